"""Tasks of reasoning-gym, scored by the data set that made them."""

from __future__ import annotations

import functools
from typing import Any

from reasoning_gym.utils import extract_answer

from vime.data.gym import GymTasks
from vime.errors import RewardError
from vime.rollout.rewards.answers import Answer, after_thinking


def reasoning_gym(answer: Answer) -> float:
    """Score, 0 to 1, of the last `<answer>...</answer>`, or of the whole response after the thinking without one.

    Raises:
        RewardError: the sample is not one of `--prompt-data reasoning_gym:...`.
    """
    task = answer.metadata.get("reasoning_gym")
    if not isinstance(task, dict) or not isinstance(task.get("tasks"), str) or not isinstance(task.get("row"), int):
        raise RewardError(
            f'metadata["reasoning_gym"] is {task!r}, allowed: what --prompt-data reasoning_gym:NAME puts there.',
            next_step="Use --rm-type reasoning_gym with --prompt-data reasoning_gym:NAME.",
            reason="reward_label",
        )
    text = extract_answer(answer.response)
    if text is None:
        text = (after_thinking(answer.response) or answer.response).strip()
    return float(_tasks(task["tasks"]).score(text, task["row"]))


@functools.lru_cache(maxsize=16)
def _tasks(name: str) -> Any:
    return GymTasks(name)
