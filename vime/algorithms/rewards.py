"""Normalisation of rewards within groups, on plain arrays; the planner uses it, so no tensor library is needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vime.errors import SampleError

STD_EPSILON = 1e-6


def normalize_rewards(
    rewards: Sequence[float] | npt.NDArray[np.floating],
    group_indices: Sequence[int | None],
    rollout_ids: Sequence[int] | None = None,
    *,
    std_normalization: bool = True,
    legacy_shape: tuple[int, int] | None = None,
) -> npt.NDArray[np.float32]:
    """Centre rewards within their group and, optionally, divide by the group's standard deviation (GRPO).

    Args:
        rewards: [N] one reward per sample.
        group_indices: [N] samples with the same number were made from the same prompt. All None: groups follow from
            the order, see `legacy_shape`.
        rollout_ids: [N] samples with the same number are segments of one rollout and count once; None means that
            every sample is a rollout of its own.
        std_normalization: divide by (Bessel-corrected standard deviation + 1e-6) where the group has more than one
            rollout.
        legacy_shape: (groups, rollouts per group) of samples without group indices. Where their product is the number
            of rollouts, consecutive rollouts make a group; otherwise, and without it, all rollouts are one group.

    Returns float32 [N], computed in float64 and equal for all segments of a rollout. A group whose rewards are all
    equal gets exact zeros. Raises `SampleError` for a reward that isn't finite, for lengths that differ, for samples
    with a group index beside samples without, and for segments of one rollout that disagree about group or reward.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2, with the sample standard deviation.
    """
    reward = np.asarray(rewards, np.float64)
    rollout = np.arange(len(reward)) if rollout_ids is None else np.asarray(rollout_ids, np.int64)
    if not len(reward) == len(group_indices) == len(rollout):
        raise SampleError(
            f"{len(reward)} rewards, {len(group_indices)} group ids and {len(rollout)} rollout ids; allowed: equal."
        )
    first, member = _rollouts(rollout)
    group = _groups(group_indices, member, len(first), legacy_shape)
    _check_finite(reward, group)
    _check_segments(reward, group, rollout, first[member])
    unit_reward, unit_group = reward[first], group[first]
    result = np.zeros_like(unit_reward)
    for number in np.unique(unit_group):
        of_group = unit_group == number
        values = unit_reward[of_group]
        if values.min() == values.max():
            continue
        centred = values - values.mean()
        if std_normalization:
            centred /= values.std(ddof=1) + STD_EPSILON
        result[of_group] = centred
    advantages: npt.NDArray[np.float32] = result[member].astype(np.float32)
    return advantages


def _rollouts(rollout: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]:
    """(first sample of each rollout, in order of appearance; number of each sample's rollout in that order)."""
    _, first, member = np.unique(rollout, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return first[order], np.argsort(order)[member]


def _groups(
    indices: Sequence[int | None],
    member: npt.NDArray[np.integer],
    num_rollouts: int,
    legacy_shape: tuple[int, int] | None,
) -> npt.NDArray[np.int64]:
    known = [index for index in indices if index is not None]
    if len(known) == len(indices):
        return np.asarray(known, np.int64)
    if known:
        without = next(position for position, index in enumerate(indices) if index is None)
        raise SampleError(
            f"sample {without} has no group_index, {len(known)} of {len(indices)} samples have one; "
            "allowed: all or none."
        )
    if legacy_shape is None or legacy_shape[0] * legacy_shape[1] != num_rollouts:
        return np.zeros(len(indices), np.int64)
    return (member // legacy_shape[1]).astype(np.int64)


def _check_finite(reward: npt.NDArray[np.float64], group: npt.NDArray[np.int64]) -> None:
    bad = np.flatnonzero(~np.isfinite(reward))
    if bad.size:
        raise SampleError(
            f"reward of sample {int(bad[0])} in group {int(group[bad[0]])} is {reward[bad[0]]}, allowed: finite."
        )


def _check_segments(
    reward: npt.NDArray[np.float64],
    group: npt.NDArray[np.int64],
    rollout: npt.NDArray[np.integer],
    first_of: npt.NDArray[np.integer],
) -> None:
    bad = np.flatnonzero((reward != reward[first_of]) | (group != group[first_of]))
    if bad.size:
        at, first = int(bad[0]), int(first_of[bad[0]])
        raise SampleError(
            f"segments of rollout {int(rollout[at])} disagree: group {int(group[first])} with reward {reward[first]}, "
            f"then group {int(group[at])} with reward {reward[at]}; allowed: one group and one reward."
        )
