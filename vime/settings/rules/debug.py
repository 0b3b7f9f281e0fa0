"""Rules on debug modes, dumps and file name templates."""

from __future__ import annotations

import string
from collections.abc import Iterator

from vime.settings.groups import Settings
from vime.settings.groups.debug import DebugSettings
from vime.settings.rules.problem import Problem, problem
from vime.settings.rules.quantities import debug_mode, records_memory, trains_only


def one_half_is_left_out(settings: Settings) -> Iterator[Problem]:
    """Leaving out both halves leaves nothing."""
    debug = settings.debug
    if debug.debug_rollout_only and trains_only(settings):
        other = "--debug-train-only" if debug.debug_train_only else "--load-debug-rollout-data"
        yield problem(
            settings,
            f"--debug-rollout-only {other}",
            allowed="one of them",
            reason="One generates without training, the other trains without generating.",
            next_step="Leave out one of the two.",
        )


def subsample_has_stored_samples(settings: Settings) -> Iterator[Problem]:
    """Only stored samples are thinned out."""
    debug = settings.debug
    if debug.load_debug_rollout_data_subsample is not None and debug.load_debug_rollout_data is None:
        yield problem(
            settings,
            "--load-debug-rollout-data-subsample --load-debug-rollout-data",
            allowed="both",
            reason="Only stored samples are thinned out.",
            next_step="Give --load-debug-rollout-data FILE.",
        )


def training_alone_has_stored_samples(settings: Settings) -> Iterator[Problem]:
    """Without engines, samples come from files."""
    debug = settings.debug
    if debug.debug_train_only and not debug.debug_rollout_only and debug.load_debug_rollout_data is None:
        yield problem(
            settings,
            "--debug-train-only --load-debug-rollout-data",
            allowed="both",
            reason="Without engines, samples come from files.",
            next_step="Give --load-debug-rollout-data FILE.",
        )


def evaluation_has_a_whole_run(settings: Settings) -> Iterator[Problem]:
    """In a debug mode there is no trainer whose weights could be evaluated, or no engine."""
    mode = debug_mode(settings)
    if mode is not None and settings.evaluation.eval_interval is not None:
        yield problem(
            settings,
            f"--eval-interval {mode}",
            allowed="one of them",
            reason="Evaluation needs trainer and engines.",
            next_step="Leave out --eval-interval.",
        )


def stored_samples_are_named_once(settings: Settings) -> Iterator[Problem]:
    """One trains without engines, the other beside them."""
    if settings.debug.load_debug_rollout_data is not None and settings.debug.load_forge_rollout_data is not None:
        yield problem(
            settings,
            "--load-debug-rollout-data --load-forge-rollout-data",
            allowed="one of them",
            reason="One trains stored samples without engines, the other while engines run.",
            next_step="Leave out one of the two.",
        )


def dumps_are_named_once(settings: Settings) -> Iterator[Problem]:
    """--dump-details names both files itself, and the reference overwrites the user's names."""
    debug = settings.debug
    given = {
        "--save-debug-rollout-data": debug.save_debug_rollout_data,
        "--save-debug-train-data": debug.save_debug_train_data,
    }
    for flag, path in given.items():
        if debug.dump_details is not None and path is not None:
            yield problem(
                settings,
                f"--dump-details {flag}",
                allowed="one of them",
                reason="--dump-details names the files of samples and training columns itself.",
                next_step=f"Leave out {flag}.",
            )


def dumps_have_different_files(settings: Settings) -> Iterator[Problem]:
    """Training columns would overwrite the samples they were made from."""
    debug = settings.debug
    if debug.save_debug_train_data is not None and debug.save_debug_train_data == debug.save_debug_rollout_data:
        yield problem(
            settings,
            "--save-debug-train-data --save-debug-rollout-data",
            allowed="two different files",
            reason="One would overwrite the other.",
            next_step="Change one of the two.",
        )


_TEMPLATES: dict[str, tuple[str, ...]] = {
    "--save-debug-rollout-data": ("rollout_id",),
    "--save-debug-train-data": ("rollout_id", "rank"),
    "--save-hf": ("rollout_id",),
}


def file_templates_tell_files_apart(settings: Settings) -> Iterator[Problem]:
    """A name without its placeholders is overwritten at each batch; an unknown one fails hours later."""
    given = {
        "--save-debug-rollout-data": settings.debug.save_debug_rollout_data,
        "--save-debug-train-data": settings.debug.save_debug_train_data,
        "--save-hf": settings.checkpoint.save_hf,
    }
    for flag, template in given.items():
        needed = _TEMPLATES[flag]
        if template is not None and _placeholders(template) != set(needed):
            wanted = " and ".join(f"{{{name}}}" for name in needed)
            yield problem(
                settings,
                flag,
                allowed=f"a path with {wanted}, and no other placeholder",
                reason="Each file needs a name of its own.",
                next_step=f"Put {wanted} into the path.",
            )


def _placeholders(template: str) -> set[str] | None:
    """Names between braces; None when the braces don't match."""
    try:
        return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError:
        return None


def checks_are_switched_on(settings: Settings) -> Iterator[Problem]:
    """What a check may be is of no use without the check."""
    debug, default = settings.debug, DebugSettings().ci_train_rollout_logprob_abs_diff_threshold
    changed = {
        "--ci-disable-kl-checker": debug.ci_disable_kl_checker,
        "--ci-train-rollout-logprob-abs-diff-threshold": debug.ci_train_rollout_logprob_abs_diff_threshold != default,
    }
    for name in [name for name, given in changed.items() if given and not debug.ci_test]:
        yield problem(
            settings,
            f"--ci-test {name}",
            found=f"{name} without --ci-test",
            allowed="both",
            reason="Without --ci-test nothing is checked.",
            next_step="Give --ci-test.",
        )


def a_snapshot_folder_gets_snapshots(settings: Settings) -> Iterator[Problem]:
    """A folder alone records nothing."""
    folder = settings.debug.memory_snapshot_dir
    if folder != DebugSettings().memory_snapshot_dir and not records_memory(settings):
        yield problem(
            settings,
            "--memory-snapshot-dir --memory-snapshot-num-steps",
            found=f"--memory-snapshot-dir {folder} without --memory-snapshot-num-steps",
            allowed="both",
            reason="Memory is recorded only when it is asked for.",
            next_step="Give --memory-snapshot-num-steps N, or --memory-recorder memray.",
        )


RULES = (
    checks_are_switched_on,
    a_snapshot_folder_gets_snapshots,
    one_half_is_left_out,
    subsample_has_stored_samples,
    training_alone_has_stored_samples,
    evaluation_has_a_whole_run,
    stored_samples_are_named_once,
    dumps_are_named_once,
    dumps_have_different_files,
    file_templates_tell_files_apart,
)
