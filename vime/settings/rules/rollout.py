"""Rules on generation and rewards."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping

from vime.settings.groups import Settings
from vime.settings.rules.problem import Problem, problem
from vime.settings.rules.quantities import debug_mode, is_fully_async

REWARDS = ("deepscaler", "dapo", "f1", "gpqa", "ifbench", "math", "random", "reasoning_gym", "remote_rm")
"""Documented values of --rm-type; each also with `boxed_` before it."""
LIBRARIES: Mapping[str, tuple[str, str]] = {
    "ifbench": ("if_verifiable", "if-verifiable==0.1.2"),
    "reasoning_gym": ("reasoning_gym", "reasoning-gym==0.1.25"),
}
"""Reward -> module and package that not every environment has."""
STREAMING = "vime.rollout.vllm_rollout.generate_streaming"
DAPO_KEYS = ("score", "acc")


def built_in_reward_is_known(settings: Settings) -> Iterator[Problem]:
    """The reference finds out at the first sample."""
    name = settings.rollout.rm_type
    if name is None or settings.rollout.custom_rm_path is not None:
        return
    if name.removeprefix("boxed_") not in REWARDS:
        yield problem(
            settings,
            "--rm-type",
            found=f"--rm-type is {name!r}",
            allowed=f"{', '.join(REWARDS)}, each also as boxed_NAME",
            reason="There is no such built-in reward.",
            next_step="Choose one of these or give --custom-rm-path.",
        )


def remote_reward_has_an_address(settings: Settings) -> Iterator[Problem]:
    """remote_rm posts each sample to --rm-url."""
    rollout = settings.rollout
    if rollout.rm_type == "remote_rm" and rollout.custom_rm_path is None and rollout.rm_url is None:
        yield problem(
            settings,
            "--rm-type --rm-url",
            allowed="both",
            reason="remote_rm posts samples to that address.",
            next_step="Give --rm-url http://HOST:PORT/PATH.",
        )


def the_rewards_library_is_installed(settings: Settings) -> Iterator[Problem]:
    """A grader is imported in the process that grades, so a missing library would appear with the first sample."""
    rollout = settings.rollout
    name = "" if rollout.rm_type is None or rollout.custom_rm_path is not None else rollout.rm_type
    module, package = LIBRARIES.get(name.removeprefix("boxed_"), ("", ""))
    if module and importlib.util.find_spec(module) is None:
        yield problem(
            settings,
            "--rm-type",
            found=f"--rm-type {name}: the package {package} is not installed",
            allowed="another reward, or the package",
            reason="It does the checking.",
            next_step=f'Install it: pip install "{package}".',
        )


def a_reward_of_several_numbers_has_a_key(settings: Settings) -> Iterator[Problem]:
    """dapo tells score and accuracy apart; without a key every sample would be set aside."""
    rollout = settings.rollout
    is_dapo = rollout.rm_type in ("dapo", "boxed_dapo") and rollout.custom_rm_path is None
    if is_dapo and rollout.reward_key not in DAPO_KEYS:
        yield problem(
            settings,
            "--rm-type --reward-key",
            allowed=f"--reward-key {' or '.join(DAPO_KEYS)}",
            reason="The reward has two numbers: a score of 1 or -1, and an accuracy of 1 or 0.",
            next_step="Give --reward-key score.",
        )


def only_continued_responses_are_masked(settings: Settings) -> Iterator[Problem]:
    """Without --partial-rollout no response has an older part."""
    if settings.rollout.mask_offpolicy_in_partial_rollout and not settings.rollout.partial_rollout:
        yield problem(
            settings,
            "--mask-offpolicy-in-partial-rollout --partial-rollout",
            allowed="both",
            reason="Only continued responses have a part that an older policy generated.",
            next_step="Give --partial-rollout.",
        )


def truncated_sampling_is_recorded(settings: Settings) -> Iterator[Problem]:
    """Top-k alone is not replayed in the trainer: it would compare with the distribution over the whole vocabulary."""
    if settings.rollout.rollout_top_k != -1 and settings.rollout.rollout_top_p == 1:
        yield problem(
            settings,
            "--rollout-top-k --rollout-top-p",
            allowed="-1 with --rollout-top-p 1",
            reason="Candidates are recorded for the trainer only when --rollout-top-p is below 1; without them its "
            "log-probabilities would be those of another distribution.",
            next_step="Leave out --rollout-top-k, or give --rollout-top-p below 1.",
        )


def streams_have_no_columns(settings: Settings) -> Iterator[Problem]:
    """A stream brings tokens, log-probabilities and policy versions; every sample would be set aside."""
    rollout, objective = settings.rollout, settings.objective
    needing = {
        "--use-score-centering": objective.use_score_centering,
        "--use-rollout-routing-replay": objective.use_rollout_routing_replay,
        "--rollout-top-p": rollout.rollout_top_p < 1,
    }
    for flag in [
        flag for flag, needs in needing.items() if needs and rollout.custom_generate_function_path == STREAMING
    ]:
        yield problem(
            settings,
            f"--custom-generate-function-path {flag}",
            allowed="one of them",
            reason="A stream has no candidates, nuclei or routes of its tokens.",
            next_step="Leave out --custom-generate-function-path.",
        )


def distributed_rollouts_have_no_view_of_all_samples(settings: Settings) -> Iterator[Problem]:
    """Producers on several nodes each see their own groups, so nothing can see kept and dropped ones together."""
    if (
        settings.rollout.rollout_all_samples_process_path is not None
        and settings.queue.rollout_data_transport == "straw"
        and is_fully_async(settings)
    ):
        yield problem(
            settings,
            "--rollout-all-samples-process-path --rollout-data-transport --flush-cache-interval",
            allowed="no --rollout-all-samples-process-path in a fully asynchronous rollout through straw",
            reason="Each producer sees only its own groups.",
            next_step="Leave it out; --rollout-sample-filter-path sees the groups of a batch.",
        )


def converted_samples_are_made_once(settings: Settings) -> Iterator[Problem]:
    """The function makes the rewards too, of batches that a whole run plans; no queue keeps what it makes."""
    if settings.rollout.custom_convert_samples_to_train_data_path is None:
        return
    mode, flag = debug_mode(settings), "--custom-convert-samples-to-train-data-path"
    others = {
        "--custom-reward-post-process-path": settings.rollout.custom_reward_post_process_path is not None,
        "--rollout-queue-online-gc": settings.queue.rollout_queue_online_gc,
        mode or "--debug-train-only": mode is not None,
    }
    for other in [other for other, given in others.items() if given]:
        yield problem(
            settings,
            f"{flag} {other}",
            found=f"{flag} with {other}",
            allowed="one of them",
            reason="What the function makes are a run's own batches, rewards included, beside what the queue keeps.",
            next_step=f"Leave out {other}.",
        )


def only_a_run_has_a_buffer(settings: Settings) -> Iterator[Problem]:
    """A debug mode trains its files, or generates without choosing."""
    mode = debug_mode(settings)
    if settings.data.buffer_filter_path is not None and mode is not None:
        yield problem(
            settings,
            f"--buffer-filter-path {mode}",
            found=f"--buffer-filter-path with {mode}",
            allowed="one of them",
            reason="There is no buffer to choose from.",
            next_step="Leave out --buffer-filter-path.",
        )


RULES = (
    converted_samples_are_made_once,
    only_a_run_has_a_buffer,
    built_in_reward_is_known,
    remote_reward_has_an_address,
    a_reward_of_several_numbers_has_a_key,
    only_continued_responses_are_masked,
    truncated_sampling_is_recorded,
    streams_have_no_columns,
    distributed_rollouts_have_no_view_of_all_samples,
)
FILE_RULES = (the_rewards_library_is_installed,)
"""Rules that look for installed packages."""
