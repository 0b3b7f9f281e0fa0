"""From accepted groups to one persisted batch plan. Pure: no token, no process, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pipeline.packing import PackingSettings, pack_step
from storage.queue_types import AcceptedGroup
from storage.refs import GroupRef
from storage.sample_sums import SampleSums
from storage.summary import UNKNOWN_SOURCE, GroupSummary
from vime.algorithms.rewards import normalize_rewards
from vime.utils.types import Sample

PLAN_VERSION = 1


class PlannedGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """One accepted group: its queue position and the reference of its payload."""

    position: int
    group_index: int
    ref: GroupRef
    sums: SampleSums = SampleSums()
    """Reported of its samples."""


class PlannedSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sample of the batch; `group` and `member` say where its rows are."""

    group: int
    member: int
    sample_index: int
    total_length: int
    response_length: int
    advantage: float
    mask_sum: float
    """Trained tokens of the whole rollout that the sample belongs to."""
    reward: float
    """As it is reported."""
    age_versions: int
    truncated: bool
    source_name: str = UNKNOWN_SOURCE
    removed: bool = False
    """Not trained: its mask counts as zeros."""
    num_loss_tokens: int = 0
    """Its own response tokens that count in the loss."""
    non_generation_s: float = 0.0
    """Seconds outside the engine."""
    is_of_unknown_version: bool = False
    """It has a response, and nothing says which policy made it."""


class StepPlan(msgspec.Struct, frozen=True):
    """One optimizer step: for each data-parallel rank its microbatches, each a list of sample numbers of the plan."""

    num_rollouts: int
    num_trained_tokens: int
    ranks: list[list[list[int]]]


def batch_id_of(branch: str, rollout_id: int) -> str:
    """Name of a rollout batch's plan in the queue."""
    return f"batch:{branch}:{rollout_id}"


class BatchPlan(msgspec.Struct, frozen=True):
    """What one rollout batch trains, in full, before anything is trained."""

    version: int
    branch: str
    rollout_id: int
    policy_version: int
    groups: list[PlannedGroup]
    samples: list[PlannedSample]
    steps: list[StepPlan]

    @property
    def batch_id(self) -> str:
        return batch_id_of(self.branch, self.rollout_id)

    @property
    def positions(self) -> list[int]:
        return [group.position for group in self.groups]


@dataclass(frozen=True)
class PlanSettings:
    """The settings that a plan depends on."""

    rollout_batch_size: int
    rollouts_per_step: int
    packing: PackingSettings
    normalize_rewards: bool
    normalize_std: bool


@dataclass(frozen=True)
class ProcessedRewards:
    """What a function of the user's own made of a batch's rewards, for each group and member."""

    raw: list[list[float]]
    """To be reported."""
    rewards: list[list[float]]
    """To be trained on as they are."""


def oldest_version(summary: GroupSummary) -> int:
    """Oldest policy version among a group's samples; 0 where nothing was sampled."""
    return min((version for version in summary.min_versions if version is not None), default=0)


def select_groups(groups: Sequence[AcceptedGroup], count: int) -> list[AcceptedGroup]:
    """The `count` groups to train next: oldest policy version first, then first accepted first.

    They come in the order of their prompts, which doesn't depend on when each was finished.
    """
    return sorted(oldest_first(groups)[:count], key=lambda group: group.group_index)


def oldest_first(groups: Sequence[AcceptedGroup]) -> list[AcceptedGroup]:
    """The groups in the order in which they are taken: oldest policy version first, then first accepted first."""
    return sorted(groups, key=lambda group: (oldest_version(group.summary), group.position))


def plan_batch(
    groups: Sequence[AcceptedGroup],
    settings: PlanSettings,
    *,
    branch: str,
    rollout_id: int,
    policy_version: int,
    processed: ProcessedRewards | None = None,
) -> BatchPlan:
    """Plan rollout batch `rollout_id` from the waiting groups.

    The same groups and settings give the same plan, whatever the order they are passed in. With `processed`, which
    follows the order of `select_groups`, rewards are not normalised.

    Raises:
        ValueError: fewer groups than a batch needs, or fewer samples in a step than ranks.
        TrainerError: a sample is longer than a microbatch may be.
    """
    if len(groups) < settings.rollout_batch_size:
        raise ValueError(f"{len(groups)} groups wait, a batch needs {settings.rollout_batch_size}")
    chosen = select_groups(groups, settings.rollout_batch_size)
    samples = _plan_samples(chosen, settings, policy_version, processed)
    steps = [
        _plan_step(chosen, samples, rollouts, settings.packing)
        for rollouts in _cut_into_steps(samples_of_rollouts(chosen), settings)
    ]
    planned = [
        PlannedGroup(group.position, group.summary.group_index, group.ref, group.summary.sums) for group in chosen
    ]
    return BatchPlan(PLAN_VERSION, branch, rollout_id, policy_version, planned, samples, steps)


def samples_of_rollouts(groups: Sequence[AcceptedGroup]) -> list[list[int]]:
    """Sample numbers of each rollout; samples of one group that share a `rollout_id` are segments of one rollout."""
    rollouts: dict[tuple[int, int], list[int]] = {}
    keys = [(number, rollout_id) for number, group in enumerate(groups) for rollout_id in group.summary.rollout_ids]
    for sample, key in enumerate(keys):
        rollouts.setdefault(key, []).append(sample)
    return list(rollouts.values())


def _cut_into_steps(rollouts: Sequence[list[int]], settings: PlanSettings) -> list[list[list[int]]]:
    """Rollouts of each optimizer step. What fills no step becomes a smaller one, or joins the last one where it has
    fewer samples than there are ranks."""
    size = settings.rollouts_per_step
    steps = [list(rollouts[start : start + size]) for start in range(0, len(rollouts), size)]
    if len(steps) > 1 and sum(map(len, steps[-1])) < settings.packing.num_ranks:
        rest = steps.pop()
        steps[-1].extend(rest)
    return steps


def _rewards_of(summary: GroupSummary, settings: PlanSettings) -> tuple[list[float], list[float]]:
    """(reported rewards, advantages) of a group's members."""
    rewards = [_known(reward) for reward in summary.rewards]
    reported = summary.reported_rewards or rewards
    if not settings.normalize_rewards:
        return reported, rewards
    groups = [summary.group_index] * len(rewards)
    advantages = normalize_rewards(rewards, groups, summary.rollout_ids, std_normalization=settings.normalize_std)
    return reported, advantages.tolist()


def _plan_samples(
    groups: Sequence[AcceptedGroup],
    settings: PlanSettings,
    policy_version: int,
    processed: ProcessedRewards | None,
) -> list[PlannedSample]:
    samples = []
    for number, group in enumerate(groups):
        summary = group.summary
        rollout_mask_sums: dict[int, int] = {}
        for rollout_id, mask_sum in zip(summary.rollout_ids, summary.mask_sums, strict=True):
            rollout_mask_sums[rollout_id] = rollout_mask_sums.get(rollout_id, 0) + mask_sum
        reported, advantages = (
            _rewards_of(summary, settings) if processed is None else (processed.raw[number], processed.rewards[number])
        )
        for member, sample_index in enumerate(summary.sample_indices):
            samples.append(
                PlannedSample(
                    group=number,
                    member=member,
                    sample_index=sample_index,
                    total_length=summary.total_lengths[member],
                    response_length=summary.response_lengths[member],
                    advantage=float(advantages[member]),
                    mask_sum=float(rollout_mask_sums[summary.rollout_ids[member]]),
                    reward=float(reported[member]),
                    age_versions=_age(policy_version, summary.min_versions[member]),
                    truncated=summary.statuses[member] == Sample.Status.TRUNCATED.value,
                    source_name=summary.source_names[member] if summary.source_names else UNKNOWN_SOURCE,
                    removed=member in summary.removed,
                    num_loss_tokens=summary.mask_sums[member],
                    non_generation_s=summary.non_generation_s[member] if summary.non_generation_s else 0.0,
                    is_of_unknown_version=summary.min_versions[member] is None and summary.response_lengths[member] > 0,
                )
            )
    return samples


def _known(reward: float | None) -> float:
    """A value that every accepted group has."""
    if reward is None:
        raise ValueError("an accepted group lacks a reward")
    return reward


def _age(policy_version: int, oldest: int | None) -> int:
    """Versions since the oldest token of a sample; 0 where nothing was sampled."""
    return 0 if oldest is None else policy_version - oldest


def _plan_step(
    groups: Sequence[AcceptedGroup],
    samples: Sequence[PlannedSample],
    rollouts: Sequence[Sequence[int]],
    packing: PackingSettings,
) -> StepPlan:
    numbers = [number for rollout in rollouts for number in rollout]
    trained = (groups[samples[number].group].summary.mask_sums[samples[number].member] for number in numbers)
    return StepPlan(
        num_rollouts=len(rollouts),
        num_trained_tokens=sum(max(tokens, 1) for tokens in trained),
        ranks=pack_step({number: samples[number].total_length for number in numbers}, packing),
    )
