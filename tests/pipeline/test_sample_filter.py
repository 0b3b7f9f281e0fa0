"""--rollout-sample-filter-path: what it removes counts for rewards and not for training."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest

from pipeline.packing import PackingSettings
from pipeline.planner import PlanSettings, plan_batch
from pipeline.sample_filter import filter_samples
from pipeline.shards import RankShard
from storage.columns import encode_group
from storage.memory_parts import PartTable
from storage.memory_pool import MemoryPool
from storage.queue_types import AcceptedGroup
from storage.summary import summarize
from tests.pipeline.test_reward_post_process import LEASE, members
from vime.errors import RewardError
from vime.utils.types import Sample

PLAN = PlanSettings(3, 6, PackingSettings(num_ranks=1, max_tokens=64), normalize_rewards=True, normalize_std=True)


def remove_first_of_group_1(args: Any, groups: list[list[Sample]]) -> None:  # noqa: ARG001
    groups[1][0].remove_sample = True


def test_a_removed_sample_keeps_its_part_in_the_rewards_and_loses_its_mask() -> None:
    groups = [members(number) for number in range(3)]
    with closing(MemoryPool("rollout", PartTable())) as pool:
        items = [(encode_group(group, reward_key="math"), LEASE) for group in groups]
        refs = pool.publish_groups(items, submission_id="s")
        accepted = [
            AcceptedGroup(number, number, ref, summarize(group, reward_key="math"))
            for number, (group, ref) in enumerate(zip(groups, refs, strict=True))
        ]
        filtered = filter_samples(accepted, pool, remove_first_of_group_1, None)
        before, after = (
            plan_batch(each, PLAN, branch="b", rollout_id=0, policy_version=1) for each in (accepted, filtered)
        )
        with RankShard(pool, after, 0) as shard:
            batches = list(shard.step(0))
    masks = {
        int(index): batch.loss_mask[start : start + length].tolist()
        for batch in batches
        for index, start, length in zip(
            batch.sample_indices,
            np.cumsum([0, *batch.response_lengths]),
            batch.response_lengths,
            strict=False,
        )
    }
    assert masks == {index: [0, 0] if index == 2 else [1, 1] for index in range(6)}
    assert [sample.advantage for sample in after.samples] == [sample.advantage for sample in before.samples]
    assert [sample.removed for sample in after.samples] == [index == 2 for index in range(6)]
    assert after.samples[2].mask_sum == 0.0
    assert after.steps[0].num_trained_tokens == before.steps[0].num_trained_tokens - 1, "a masked sample counts as one"


def test_a_filter_that_raises_ends_the_run_with_its_error() -> None:
    def raising(args: Any, groups: list[list[Sample]]) -> None:  # noqa: ARG001
        raise KeyError("level")

    told = pytest.raises(RewardError, match="--rollout-sample-filter-path raised KeyError: 'level'")
    with closing(MemoryPool("rollout", PartTable())) as pool, told:
        filter_samples([], pool, raising, None)
