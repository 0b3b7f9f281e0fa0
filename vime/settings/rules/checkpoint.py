"""Rules on checkpoints, resuming, and what is trained."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vime.settings.groups import Settings
from vime.settings.rules.problem import Problem, problem
from vime.settings.rules.quantities import debug_mode, option


def _is_recoverable(settings: Settings) -> bool:
    """Whether the run promises that a restarted trainer repeats its last batches exactly."""
    keeps_samples = (
        settings.queue.rollout_data_transport == "straw" or settings.debug.save_debug_rollout_data is not None
    )
    external = settings.engine.rollout_external_engine_addrs is not None
    return keeps_samples and not external and debug_mode(settings) is None


def there_is_something_to_train(settings: Settings) -> Iterator[Problem]:
    """A start at or past the end would report success without training anything."""
    start, total = settings.checkpoint.start_rollout_id, settings.data.num_rollout
    if start is not None and total is not None and 0 < total <= start:
        yield problem(
            settings,
            "--start-rollout-id --num-rollout",
            allowed=f"{total - 1} or less",
            reason=f"Batches are counted from 0, so the last of {total} is {total - 1}.",
            next_step="Raise --num-rollout or lower --start-rollout-id.",
        )


def a_recoverable_run_saves_its_optimizer(settings: Settings) -> Iterator[Problem]:
    """A restarted trainer repeats its last batches; without moments it would repeat them differently."""
    if settings.checkpoint.no_save_optim and not settings.trainer.use_stateless_adam and _is_recoverable(settings):
        yield problem(
            settings,
            "--no-save-optim --use-stateless-adam",
            allowed="both",
            reason="A restarted trainer must continue with the optimizer's state.",
            next_step="Leave out --no-save-optim, or give --use-stateless-adam.",
        )


def a_recoverable_run_saves_its_random_state(settings: Settings) -> Iterator[Problem]:
    """As for the optimizer."""
    if option(settings.megatron_args, "--no-save-rng") is not None and _is_recoverable(settings):
        yield Problem(
            ("--no-save-rng",),
            "--no-save-rng",
            "left out",
            "A restarted trainer must continue with the same random numbers.",
            "Leave out --no-save-rng.",
        )


def commits_are_removed_before_some_are_kept(settings: Settings) -> Iterator[Problem]:
    """Without --keep-checkpoints every commit is kept anyway."""
    if settings.checkpoint.keep_every is not None and settings.checkpoint.keep_checkpoints is None:
        yield problem(
            settings,
            "--keep-every --keep-checkpoints",
            allowed="both",
            reason="Without --keep-checkpoints nothing is removed.",
            next_step="Give --keep-checkpoints, or leave out --keep-every.",
        )


def checkpoints_can_be_resharded(settings: Settings) -> Iterator[Problem]:
    """Only torch_dist is read under another parallel layout, and only it is what commits hold."""
    value = option(settings.megatron_args, "--ckpt-format")
    if value not in (None, "torch_dist") and _is_recoverable(settings):
        yield Problem(
            ("--ckpt-format",),
            f"--ckpt-format is {value}",
            "torch_dist, or left out",
            "A run that recovers reads its checkpoints under any parallel layout.",
            "Leave out --ckpt-format.",
        )


def stateless_adam_saves_no_state(settings: Settings) -> Iterator[Problem]:
    """It keeps no moments, so there is none to save; and it is a kind of Adam."""
    if not settings.trainer.use_stateless_adam:
        return
    optimizer = option(settings.megatron_args, "--optimizer")
    if optimizer not in (None, "adam"):
        yield problem(
            settings,
            "--use-stateless-adam",
            found=f"--use-stateless-adam with --optimizer {optimizer}",
            allowed="--optimizer adam, or left out",
            reason="It is a kind of Adam.",
            next_step="Leave out --optimizer.",
        )
    if not settings.checkpoint.no_save_optim:
        yield problem(
            settings,
            "--use-stateless-adam --no-save-optim",
            allowed="both",
            reason="There is no optimizer state to save.",
            next_step="Give --no-save-optim.",
        )


def trained_parameters_are_named_once(settings: Settings) -> Iterator[Problem]:
    """One list names what is trained, the other what isn't."""
    trainer = settings.trainer
    if trainer.only_train_params_name_list is not None and trainer.freeze_params_name_list is not None:
        yield problem(
            settings,
            "--only-train-params-name-list --freeze-params-name-list",
            allowed="one of them",
            reason="One names what is trained, the other what is not.",
            next_step="Leave out one of the two.",
        )


def parameter_names_are_expressions(settings: Settings) -> Iterator[Problem]:
    """A broken regular expression would fail after the model is built."""
    trainer = settings.trainer
    lists = {
        "--only-train-params-name-list": trainer.only_train_params_name_list,
        "--freeze-params-name-list": trainer.freeze_params_name_list,
    }
    for flag, patterns in lists.items():
        for pattern in patterns or ():
            try:
                re.compile(pattern)
            except re.error as error:
                yield problem(
                    settings,
                    flag,
                    found=f"{flag} has {pattern!r}",
                    allowed="regular expressions",
                    reason=f"It doesn't parse: {error}.",
                    next_step="Correct the expression.",
                )


RULES = (
    commits_are_removed_before_some_are_kept,
    there_is_something_to_train,
    a_recoverable_run_saves_its_optimizer,
    a_recoverable_run_saves_its_random_state,
    checkpoints_can_be_resharded,
    stateless_adam_saves_no_state,
    trained_parameters_are_named_once,
    parameter_names_are_expressions,
)
