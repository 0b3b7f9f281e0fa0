"""A data source, a reward and a post-processing of the user's own, as one job uses them together."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vime.rollout.vllm_rollout import generate_rollout
from vime.utils.types import Sample

NUM_PROMPTS = 20


class Source:
    """Twenty numbers to reverse, over and over."""

    def __init__(self, args: Any) -> None:
        self._place, self._members, self._folder = 0, args.n_samples_per_prompt, Path(args.save)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = []
        for number in range(self._place, self._place + num_samples):
            digits = f"{number % NUM_PROMPTS:05d}"
            groups.append(
                [
                    Sample(prompt=f"r{digits}=", label=digits[::-1], metadata={"source_name": "own", "number": number})
                    for _ in range(self._members)
                ]
            )
        self._place += num_samples
        return groups

    def add_samples(self, groups: list[list[Sample]]) -> None:  # noqa: ARG002
        raise AssertionError("groups that come back wait in the queue")

    def save(self, rollout_id: int) -> None:
        (self._folder / f"place_{rollout_id}.json").write_text(json.dumps(self._place))

    def load(self, rollout_id: int | None = None) -> None:
        if rollout_id is not None:
            self._place = json.loads((self._folder / f"place_{rollout_id}.json").read_text())

    def __len__(self) -> int:
        return NUM_PROMPTS


def share_of_digits(args: Any, sample: Sample) -> float:  # noqa: ARG001
    """Plain, so it runs in a process of its own, which it notes."""
    sample.metadata["graded_by"] = os.getpid()
    return sum(found == wanted for found, wanted in zip(sample.response, sample.label, strict=False)) / 5


def shifted(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:  # noqa: ARG001
    """Raw rewards of 100 and more, and rewards around 0. Every sample was graded elsewhere."""
    assert all(sample.metadata["graded_by"] != os.getpid() for sample in samples)
    rewards = [float(sample.reward) for sample in samples if isinstance(sample.reward, float)]
    mean = sum(rewards) / len(rewards)
    return [100 + reward for reward in rewards], [reward - mean for reward in rewards]


def rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Vime's own rollout; notes what it was asked for."""
    with Path(args.save, "rollouts.jsonl").open("a") as notes:
        notes.write(json.dumps([rollout_id, data_source.policy_version]) + "\n")
    return generate_rollout(args, rollout_id, data_source, evaluation)


def note_all(args: Any, groups: list[list[Sample]], data_source: Any) -> None:
    """Notes the groups that a rollout kept and those that it rejected."""
    with Path(args.save, "groups.jsonl").open("a") as notes:
        notes.write(json.dumps([[group[0].group_index for group in groups], len(data_source)]) + "\n")


def keep_even(args: Any, samples: list[Sample], **_: Any) -> bool:  # noqa: ARG001
    return (samples[0].group_index or 0) % 2 == 0


def newest(args: Any, rollout_id: int, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """The groups that were accepted last; notes how many there were."""
    with Path(args.save, "buffers.jsonl").open("a") as notes:
        notes.write(json.dumps([rollout_id, len(buffer)]) + "\n")
    return [buffer.pop() for _ in range(num_samples)]


def cut_short(args: Any, samples: list[Sample]) -> dict[str, Any]:  # noqa: ARG001
    """Training data of the first two response tokens of each sample, with rewards of the function's own."""
    starts = [len(sample.tokens) - sample.response_length for sample in samples]
    return {
        "tokens": [sample.tokens[: start + 2] for sample, start in zip(samples, starts, strict=True)],
        "response_lengths": [2] * len(samples),
        "loss_masks": [[1, 1]] * len(samples),
        "rollout_log_probs": [(sample.rollout_log_probs or [])[:2] for sample in samples],
        "rewards": [(-1.0) ** place for place in range(len(samples))],
        "raw_reward": [7.0] * len(samples),
    }
