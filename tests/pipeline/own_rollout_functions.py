"""Rollout functions and functions on whole rollouts as users write them, for the tests of the stream."""
# ruff: noqa: ARG001 - the documented signatures

from __future__ import annotations

from typing import Any

from vime.rollout.base_types import RolloutFnTrainOutput
from vime.rollout.vllm_rollout import generate_rollout
from vime.utils.types import Sample

SEEN: list[tuple[list[int | None], int]] = []
"""(groups, prompts of an epoch) of each rollout that `see_all` was told of."""
CALLS: list[int] = []
"""Numbers of the rollouts that were asked for."""


def by_hand(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[list[Sample]]:
    """Makes samples without an engine; one group goes back, one has segments."""
    CALLS.append(rollout_id)
    first, second, third = data_source.get_samples(3)
    data_source.add_samples([third])
    for sample in [*first, *second]:
        sample.tokens, sample.response_length = [1, 2, 3, 4], 3
        sample.rollout_log_probs, sample.version_spans = [-0.5] * 3, [(1, 0, 3)]
        sample.reward, sample.status = 1.0, Sample.Status.COMPLETED
    first[1].rollout_id = first[0].rollout_id = first[0].index
    return [[first], second]  # type: ignore[list-item]


def doubling(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """Wraps vime's own function."""
    output = generate_rollout(args, rollout_id, data_source, evaluation)
    for group in output.samples:
        for sample in group:
            sample.reward *= 2
    return output


def cutting(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Spoils group 0 after vime's own function has made it."""
    output = generate_rollout(args, rollout_id, data_source, evaluation)
    for group in output.samples:
        if group[0].group_index == 0:
            group[0].response_length = 0
    return output


def two_ids(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Segments of one rollout that say they are of two."""
    groups = by_hand(args, rollout_id, data_source)
    groups[0][0][1].rollout_id = 77  # type: ignore[index]
    return groups


def raising(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    raise KeyError("no such environment")


def wrong(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    return 5


def remove_odd(args: Any, groups: list[list[Sample]]) -> None:
    for group in groups:
        for sample in group:
            sample.remove_sample = (sample.index or 0) % 2 == 1


def see_all(args: Any, groups: list[list[Sample]], data_source: Any) -> None:
    SEEN.append(([group[0].group_index for group in groups], len(data_source)))
