"""--custom-convert-samples-to-train-data-path: what the function returns is what is trained."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.packing import PackingSettings
from pipeline.planner import PlanSettings, plan_batch
from pipeline.sample_conversion import Conversion, convert_batch
from pipeline.shards import RankShard
from storage.archive import read_samples
from storage.checks import EnqueueRequirements, check_enqueue
from storage.columns import encode_group
from storage.memory_pool import MemoryPool
from storage.queue_types import AcceptedGroup
from storage.summary import with_removed
from tests.pipeline.test_reward_post_process import stored
from vime.errors import RewardError
from vime.utils.types import Sample

__all__ = ["stored"]

Stored = tuple[list[AcceptedGroup], MemoryPool]
CONVERSION = Conversion(partial(check_enqueue, needs=EnqueueRequirements(vocab_size=50)), encode_group)
PLAN = PlanSettings(3, 6, PackingSettings(num_ranks=1, max_tokens=64), normalize_rewards=True, normalize_std=True)


def plain(args: Any, samples: list[Sample]) -> dict[str, Any]:  # noqa: ARG001
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [sample.reward["style"] for sample in samples],
        "loss_masks": [[1] * sample.response_length for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
        "total_lengths": [len(sample.tokens) for sample in samples],
    }


def longer(args: Any, samples: list[Sample]) -> dict[str, Any]:
    """An extra response token for each, as tensors, with rewards of the batch as a whole."""
    data = plain(args, samples)
    return {
        **data,
        "tokens": [torch.tensor([*sample.tokens, 9]) for sample in samples],
        "response_lengths": [3] * len(samples),
        "loss_masks": [np.array([0, 1, 1])] * len(samples),
        "rollout_log_probs": [torch.tensor([-0.5, -0.25, -0.125])] * len(samples),
        "rewards": torch.arange(len(samples)) - 2.5,
        "raw_reward": [sample.reward["math"] for sample in samples],
        "truncated": [1] * len(samples),
        "sample_indices": [sample.index for sample in samples],
        "source_names": ["made"] * len(samples),
    }


def convert(stored: Stored, function: Any) -> Any:
    groups, pool = stored
    return convert_batch(groups, pool, function, "args", conversion=CONVERSION, batch_id="batch:b:0")


def test_ranks_read_what_the_function_made_and_its_rewards_are_the_advantages(stored: Stored) -> None:
    groups, pool = stored
    converted, processed = convert(stored, longer)
    plan = plan_batch(converted, PLAN, branch="b", rollout_id=0, policy_version=1, processed=processed)
    with RankShard(pool, plan, 0) as shard:
        (batch,) = shard.step(0)
    assert batch.tokens.tolist() == [1, 2, 3, 9] * 6
    assert batch.loss_mask.tolist() == [0, 1, 1] * 6
    assert batch.sampler_log_probs.tolist() == [-0.5, -0.25, -0.125] * 6
    assert [sample.advantage for sample in plan.samples] == [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]
    assert [sample.reward for sample in plan.samples] == [0.0, 1.0] * 3
    assert all(sample.truncated and sample.mask_sum == 2.0 for sample in plan.samples)
    assert {sample.source_name for sample in plan.samples} == {"made"}
    assert plan.positions == [group.position for group in groups], "the same groups are called trained"
    assert read_samples(pool, groups[0].ref)[0].tokens == [1, 2, 3], "what the queue holds is untouched"


def test_the_same_batch_converted_again_has_the_same_references(stored: Stored) -> None:
    assert convert(stored, longer) == convert(stored, longer)


def test_what_the_function_leaves_out_is_not_trained(stored: Stored) -> None:
    converted, _ = convert(stored, plain)
    (first, _) = read_samples(stored[1], converted[0].ref)
    assert first.rollout_topk_token_ids is None
    assert first.reward == 0.5


def test_a_removed_sample_is_seen_as_such_and_stays_removed(stored: Stored) -> None:
    groups, pool = stored
    removed = AcceptedGroup(10, 0, groups[0].ref, with_removed(groups[0].summary, [1]))
    seen: list[bool] = []

    def look(args: Any, samples: list[Sample]) -> dict[str, Any]:
        seen.extend(sample.remove_sample for sample in samples)
        return plain(args, samples)

    converted, _ = convert(([removed, *groups[1:]], pool), look)
    assert seen == [False, True, False, False, False, False]
    assert converted[0].summary.mask_sums == [2, 0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": [[1]]}, "returned 1 entries of tokens, allowed: one for each of 6 samples"),
        (
            {"weights": [1] * 6},
            "returned the unknown names weights, allowed: tokens, response_lengths, rewards and",
        ),
        ({"rewards": [float("nan")] * 6}, "returned nan in rewards, allowed: finite numbers"),
        ({"sample_indices": [5] * 6}, "returned sample 5 in place 0, allowed: sample 0 there"),
        ({"rollout_log_probs": None}, ": .*no rollout_log_probs"),
        ({"tokens": [[1, 2, 77]] * 6}, ": .*77"),
    ],
)
def test_what_can_t_be_trained_is_refused_with_what_is_wrong(stored: Stored, change: Any, said: str) -> None:
    with pytest.raises(RewardError, match=f"--custom-convert-samples-to-train-data-path ?{said}"):
        convert(stored, lambda args, samples: {**plain(args, samples), **change})


def test_a_function_that_raises_or_returns_no_dict_is_refused(stored: Stored) -> None:
    with pytest.raises(RewardError, match="raised ZeroDivisionError"):
        convert(stored, lambda *_: 1 / 0)
    with pytest.raises(RewardError, match="returned list, allowed: a dict of lists"):
        convert(stored, lambda *_: [])
    with pytest.raises(RewardError, match="returned nothing under response_lengths, rewards"):
        convert(stored, lambda *_: {"tokens": [[1]] * 6})
