"""The plan is a function of the accepted groups and the settings."""

import random

import msgspec
import numpy as np
import pytest

from pipeline.messages import decode, encode
from pipeline.packing import PackingSettings
from pipeline.planner import BatchPlan, PlanSettings, ProcessedRewards, plan_batch
from storage.queue_types import AcceptedGroup
from storage.refs import PoolRef
from storage.sample_sums import SampleSums
from storage.summary import GroupSummary

SETTINGS = PlanSettings(
    rollout_batch_size=4,
    rollouts_per_step=8,
    packing=PackingSettings(num_ranks=2, max_tokens=40),
    normalize_rewards=True,
    normalize_std=True,
)


def group(
    position: int, *, version: int | None = 1, rewards: tuple[float, ...] = (0.0, 1.0), masks: tuple[int, ...] = (3, 4)
) -> AcceptedGroup:
    size = len(rewards)
    ref = PoolRef("r", f"pack-{position}", "s", 1, "c", 1, "sha256", 0, 0, f"digest-{position}", 4, 100)
    return AcceptedGroup(
        position,
        100 + position,
        ref,
        GroupSummary(
            group_index=100 + position,
            sample_indices=[position * size + member for member in range(size)],
            rollout_ids=[position * size + member for member in range(size)],
            total_lengths=[8 + position % 3 + member for member in range(size)],
            response_lengths=[4] * size,
            mask_sums=list(masks),
            rewards=list(rewards),
            min_versions=[version] * size,
            max_versions=[version] * size,
            statuses=["completed", "truncated"],
            num_spanning_samples=0,
        ),
    )


def plan(groups: list[AcceptedGroup], settings: PlanSettings = SETTINGS) -> BatchPlan:
    return plan_batch(groups, settings, branch="b", rollout_id=3, policy_version=5)


def test_processed_rewards_are_trained_as_they_are_and_the_raw_ones_reported() -> None:
    groups = [group(position) for position in range(4)]
    processed = ProcessedRewards([[1.0, 2.0]] * 4, [[-7.0, 9.0]] * 4)
    planned = plan_batch(groups, SETTINGS, branch="b", rollout_id=3, policy_version=5, processed=processed)
    assert [(sample.reward, sample.advantage) for sample in planned.samples] == [(1.0, -7.0), (2.0, 9.0)] * 4


def test_what_is_reported_of_samples_comes_from_the_summary_of_their_group() -> None:
    groups = [group(position) for position in range(3)]
    told = group(3, version=None, masks=(1, 0))
    sums = SampleSums(num_repetitive=1)
    summary = msgspec.structs.replace(told.summary, non_generation_s=[0.5, 0.0], sums=sums, response_lengths=[4, 0])
    planned = plan([*groups, msgspec.structs.replace(told, summary=summary)])
    samples = [s for s in planned.samples if planned.groups[s.group].position == 3]
    assert [s.num_loss_tokens for s in samples] == [1, 0]
    assert [s.non_generation_s for s in samples] == [0.5, 0.0]
    assert [s.is_of_unknown_version for s in samples] == [True, False], "the second has no response"
    assert [each.sums for each in planned.groups if each.position == 3] == [sums]


def test_same_groups_in_any_order_give_the_same_plan_bytes() -> None:
    groups = [group(position, version=position % 2) for position in range(7)]
    shuffled = groups.copy()
    random.Random(1).shuffle(shuffled)
    assert encode(plan(groups)) == encode(plan(shuffled))


def test_oldest_policy_version_goes_first_then_first_accepted() -> None:
    groups = [group(0, version=3), group(1, version=1), group(2, version=3), group(3, version=1), group(4, version=2)]
    assert plan(groups).positions == [0, 1, 3, 4], "chosen by age, in the order of their prompts"


def test_every_chosen_sample_is_planned_once() -> None:
    result = plan([group(position) for position in range(4)])
    (step,) = result.steps
    numbers = sorted(n for rank in step.ranks for microbatch in rank for n in microbatch)
    assert numbers == list(range(8))
    assert step.num_rollouts == 8


def test_advantages_are_centred_and_scaled_within_each_group() -> None:
    result = plan([group(0, rewards=(1.0, 3.0)), *(group(position, rewards=(2.0, 2.0)) for position in range(1, 4))])
    expected = 1.0 / (np.sqrt(2.0) + 1e-6)
    assert [sample.advantage for sample in result.samples[:2]] == pytest.approx([-expected, expected])
    assert [sample.advantage for sample in result.samples[2:]] == [0.0] * 6


def test_raw_rewards_are_advantages_when_normalisation_is_off() -> None:
    settings = PlanSettings(**{**vars(SETTINGS), "normalize_rewards": False})
    result = plan([group(position, rewards=(0.25, 1.0)) for position in range(4)], settings)
    assert [sample.advantage for sample in result.samples] == [0.25, 1.0] * 4


def test_a_fully_masked_sample_counts_as_one_token_in_the_denominator() -> None:
    result = plan([group(position, masks=(0, 4)) for position in range(4)])
    assert result.steps[0].num_trained_tokens == 4 * (1 + 4)


def test_a_batch_of_two_steps_holds_the_configured_number_of_samples_in_each() -> None:
    settings = PlanSettings(**{**vars(SETTINGS), "rollouts_per_step": 4})
    result = plan([group(position) for position in range(4)], settings)
    assert [step.num_rollouts for step in result.steps] == [4, 4]


def segmented(position: int, rollout_ids: list[int]) -> AcceptedGroup:
    """A group whose samples with equal rollout ids are segments of one rollout."""
    whole = group(position, rewards=(1.0,) * len(rollout_ids), masks=tuple(range(1, len(rollout_ids) + 1)))
    summary = msgspec.structs.replace(whole.summary, rollout_ids=rollout_ids, statuses=["completed"] * len(rollout_ids))
    return msgspec.structs.replace(whole, summary=summary)


def test_a_step_counts_rollouts_however_many_segments_they_have() -> None:
    groups = [segmented(0, [0, 0, 0, 1]), segmented(1, [2, 3]), segmented(2, [4, 4]), segmented(3, [5])]
    settings = PlanSettings(**{**vars(SETTINGS), "rollouts_per_step": 3})
    first, second = plan(groups, settings).steps
    assert (first.num_rollouts, second.num_rollouts) == (3, 3)
    assert sorted(n for rank in first.ranks for members in rank for n in members) == [0, 1, 2, 3, 4]
    assert sorted(n for rank in second.ranks for members in rank for n in members) == [5, 6, 7, 8]


def test_segments_of_a_rollout_share_its_sum_of_trained_tokens() -> None:
    result = plan([segmented(0, [7, 8, 7]), *(segmented(position, [position]) for position in range(1, 4))])
    assert [sample.mask_sum for sample in result.samples] == [1 + 3, 2, 1 + 3, 1, 1, 1]
    assert result.steps[0].num_trained_tokens == 1 + 2 + 3 + 1 + 1 + 1


def test_rollouts_that_fill_no_step_make_a_smaller_one() -> None:
    settings = PlanSettings(**{**vars(SETTINGS), "rollouts_per_step": 3})
    assert [step.num_rollouts for step in plan([group(position) for position in range(4)], settings).steps] == [3, 3, 2]


def test_rollouts_too_few_for_the_ranks_join_the_step_before() -> None:
    settings = PlanSettings(**{**vars(SETTINGS), "rollouts_per_step": 7})
    assert [step.num_rollouts for step in plan([group(position) for position in range(4)], settings).steps] == [8]


def test_ages_are_counted_from_the_oldest_token() -> None:
    result = plan([group(position, version=2) for position in range(4)])
    assert {sample.age_versions for sample in result.samples} == {3}


def test_what_was_not_sampled_has_no_age_and_keeps_its_order() -> None:
    records = [group(position, version=None) for position in range(5)]
    found = plan(records)
    assert found.positions == [0, 1, 2, 3]
    assert {sample.age_versions for sample in found.samples} == {0}


def test_too_few_groups_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="3 groups wait, a batch needs 4"):
        plan([group(position) for position in range(3)])


def test_plan_survives_its_stored_form() -> None:
    result = plan([group(position) for position in range(4)])
    assert decode(encode(result), BatchPlan) == result
    assert msgspec.msgpack.decode(encode(result))["branch"] == "b"


def test_a_raw_reward_is_reported_and_the_reward_is_trained() -> None:
    groups = [group(position) for position in range(4)]
    raw = msgspec.structs.replace(groups[0].summary, reported_rewards=[10.0, 20.0])
    groups[0] = msgspec.structs.replace(groups[0], summary=raw)
    planned = plan(groups).samples[:2]
    assert [sample.reward for sample in planned] == [10.0, 20.0]
    assert [sample.advantage for sample in planned] == pytest.approx([-0.7071, 0.7071], abs=1e-3)
