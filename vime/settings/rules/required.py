"""Rules on what every run needs."""

from __future__ import annotations

from collections.abc import Iterator

from vime.settings.groups import Settings
from vime.settings.rules.problem import Problem, problem
from vime.settings.rules.quantities import trains_only


def needed_flags_are_given(settings: Settings) -> Iterator[Problem]:
    """Flags without a default that no run can do without, named together."""
    data = settings.data
    needed = {
        "--hf-checkpoint": settings.checkpoint.hf_checkpoint,
        "--prompt-data": data.prompt_data or data.data_source_path or (trains_only(settings) or None),
        "--num-rollout": data.num_epoch if data.num_rollout is None else data.num_rollout,
        "--rollout-batch-size": data.rollout_batch_size,
        "--rollout-max-response-len": settings.rollout.rollout_max_response_len
        or (settings.objective.is_supervised or None),
    }
    missing = tuple(name for name, value in needed.items() if value is None)
    if missing:
        yield Problem(missing, f"Missing: {', '.join(missing)}", "a value for each", "", "Give each a value.")


def reward_is_named(settings: Settings) -> Iterator[Problem]:
    """Samples that the run generates need a reward; stored ones have it, and fine-tuning and distillation need none."""
    rollout = settings.rollout
    objective = settings.objective
    needs_none = trains_only(settings) or objective.is_supervised or objective.use_opd
    if rollout.rm_type is None and rollout.custom_rm_path is None and not needs_none:
        yield problem(
            settings,
            "--rm-type --custom-rm-path",
            found="No reward is named",
            allowed="--rm-type or --custom-rm-path",
            reason="Every sample needs one.",
            next_step="Give --rm-type or --custom-rm-path.",
        )


def run_folder_is_named(settings: Settings) -> Iterator[Problem]:
    """Checkpoints (--save-interval, --release-train), queue, logs and metrics need a folder."""
    if settings.checkpoint.save is None:
        yield problem(
            settings,
            "--save",
            found="No run folder is named",
            allowed="--save DIR",
            reason="Checkpoints, queue, logs and metrics need one.",
            next_step="Give --save DIR.",
        )


RULES = (needed_flags_are_given, reward_is_named, run_folder_is_named)
