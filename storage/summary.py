"""What planning needs to know about a group: a few numbers a sample, no token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from storage.sample_sums import SampleSums, sample_sums
from vime.errors import SampleError
from vime.utils.types import Sample

UNKNOWN_SOURCE = "unknown"


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Small columns over the members of one group; every list has one entry per member, in order."""

    group_index: int
    sample_indices: list[int]
    rollout_ids: list[int]
    """Falls back to the sample index."""
    total_lengths: list[int]
    """Prompt and response tokens."""
    response_lengths: list[int]
    mask_sums: list[int]
    """Response tokens that count in the loss; 0 for a removed sample."""
    rewards: list[float | None]
    """None where no reward was given."""
    min_versions: list[int | None]
    """Oldest policy version among the sampled tokens; None when nothing was sampled."""
    max_versions: list[int | None]
    statuses: list[str]
    num_spanning_samples: int
    """Members whose tokens come from more than one policy version."""
    reported_rewards: list[float] = []
    """What is reported in place of the rewards: `metadata["raw_reward"]` where a member has it. Empty: the rewards."""
    source_names: list[str] = []
    """Where each prompt comes from. Empty: all unknown."""
    removed: list[int] = []
    """Members that are not trained though their stored mask may say so; `mask_sums` has 0 for them."""
    non_generation_s: list[float] = []
    """Seconds outside the engine. Empty: none for any."""
    sums: SampleSums = SampleSums()
    """Over all members."""


def summarize(samples: Sequence[Sample], *, reward_key: str | None = None) -> GroupSummary:
    """Summary of one group.

    `reward_key` picks the number out of dict rewards. Raises `SampleError` for an empty group, members of different
    groups, a member without an index, or a dict reward without the key.
    """
    if not samples:
        raise SampleError("A group must have at least one sample, found none.")
    group_index = samples[0].group_index
    for position, sample in enumerate(samples):
        if sample.group_index is None or sample.group_index != group_index:
            raise SampleError(
                f"member {position} has group_index {sample.group_index}, allowed: {group_index}, that of member 0."
                if group_index is not None
                else f"member {position} has no group_index."
            )
        if sample.index is None:
            raise SampleError(f"member {position} of group {group_index} has no index.")
    indices = [sample.index for sample in samples if sample.index is not None]
    rewards = [scalar_reward(sample, reward_key) for sample in samples]
    return GroupSummary(
        group_index=group_index if group_index is not None else 0,
        sample_indices=indices,
        rollout_ids=[
            index if sample.rollout_id is None else sample.rollout_id
            for index, sample in zip(indices, samples, strict=True)
        ],
        total_lengths=[len(sample.tokens) for sample in samples],
        response_lengths=[sample.response_length for sample in samples],
        mask_sums=[int(sample.mask_array().sum()) for sample in samples],
        rewards=rewards,
        min_versions=[sample.min_version() for sample in samples],
        max_versions=[sample.max_version() for sample in samples],
        statuses=[sample.status.value for sample in samples],
        num_spanning_samples=sum(len({version for version, _, _ in sample.version_spans}) > 1 for sample in samples),
        reported_rewards=_reported(samples, rewards),
        source_names=_named([source_name(sample) for sample in samples]),
        non_generation_s=seconds if any(seconds := [sample.non_generation_time for sample in samples]) else [],
        sums=sample_sums(samples),
    )


def with_removed(summary: GroupSummary, removed: Sequence[int]) -> GroupSummary:
    """The summary with these members not trained."""
    if not removed:
        return summary
    sums = [0 if member in removed else mask_sum for member, mask_sum in enumerate(summary.mask_sums)]
    return msgspec.structs.replace(summary, mask_sums=sums, removed=list(removed))


def source_name(sample: Sample) -> str:
    """The attribute `source` that the user's code may have set, else `metadata["source_name"]`, else unknown."""
    return str(vars(sample).get("source") or sample.metadata.get("source_name") or UNKNOWN_SOURCE)


def _named(names: list[str]) -> list[str]:
    return [] if set(names) == {UNKNOWN_SOURCE} else names


def _reported(samples: Sequence[Sample], rewards: Sequence[float | None]) -> list[float]:
    """Empty where no member has a raw reward that is a finite number, or one has no reward."""
    raw = [_finite(sample.metadata.get("raw_reward")) for sample in samples]
    shown = [reward if value is None else value for value, reward in zip(raw, rewards, strict=True)]
    known = [value for value in shown if value is not None]
    return known if len(known) == len(shown) and any(value is not None for value in raw) else []


def _finite(value: object) -> float | None:
    """A finite number as a float, None for anything else."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def scalar_reward(sample: Sample, reward_key: str | None) -> float | None:
    """The reward as one number, None when there is none. Raises `SampleError` when a dict lacks `reward_key`."""
    if sample.reward is None:
        return None
    if not isinstance(sample.reward, dict):
        return float(sample.reward)
    if reward_key is None or reward_key not in sample.reward:
        raise SampleError(
            f"sample {sample.index} of group {sample.group_index}: reward is a dict with keys "
            f"{sorted(sample.reward)}, and the reward key is {reward_key!r}.",
            next_step="Set --reward-key to one of them.",
        )
    return float(sample.reward[reward_key])
