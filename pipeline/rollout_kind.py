"""Which of the two kinds of rollouts a run has."""

from __future__ import annotations

from vime.settings.groups import Settings

STREAMS = (
    "vime.rollout.vllm_rollout.generate_rollout",
    "vime.rollout.fully_async_rollout.generate_rollout_fully_async",
)
"""Values of --rollout-function-path that stand for vime's own stream of groups."""


def is_stream(settings: Settings) -> bool:
    """Whether groups are one stream, rather than rollouts that a function makes one after another.

    Functions on whole rollouts, kept and rejected groups together, need the latter.
    """
    rollout = settings.rollout
    return rollout.rollout_function_path in STREAMS and rollout.rollout_all_samples_process_path is None
