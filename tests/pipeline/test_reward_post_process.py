"""The user's function on the rewards of a batch: what it sees, and what it may return."""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from pipeline.planner import ProcessedRewards
from pipeline.reward_post_process import process_rewards
from storage.columns import encode_group
from storage.memory_parts import PartTable
from storage.memory_pool import MemoryPool
from storage.queue_types import AcceptedGroup
from storage.refs import Lease, lease_to_bytes
from storage.summary import summarize
from vime.errors import RewardError
from vime.utils.types import Sample

MEMBERS = 2
LEASE = lease_to_bytes(Lease("run", "queue", "task", "attempt", 1, "epoch", "token", "worker"))


def members(group_index: int) -> list[Sample]:
    return [
        Sample(
            group_index=group_index,
            index=group_index * MEMBERS + member,
            prompt=f"prompt {group_index}",
            tokens=[1, 2, 3],
            response="ab",
            response_length=2,
            reward={"math": float(member), "style": 0.5},
            rollout_log_probs=[-0.5, -0.25],
            rollout_topk_token_ids=np.zeros((2, 4), np.int32),
            rollout_topk_log_probs=np.zeros((2, 4), np.float32),
            version_spans=[(1, 0, 2)],
            metadata={"level": group_index},
            status=Sample.Status.COMPLETED,
        )
        for member in range(MEMBERS)
    ]


@pytest.fixture
def stored() -> Any:
    """A pool with three groups, and what the queue says of them."""
    groups = [members(number) for number in range(3)]
    with closing(MemoryPool("rollout", PartTable())) as pool:
        items = [(encode_group(group, reward_key="math"), LEASE) for group in groups]
        refs = pool.publish_groups(items, submission_id="s")
        accepted = [
            AcceptedGroup(10 + number, number, ref, summarize(group, reward_key="math"))
            for number, (group, ref) in enumerate(zip(groups, refs, strict=True))
        ]
        yield accepted, pool


def test_the_function_gets_every_sample_of_the_batch_in_order_but_no_candidates(stored: Any) -> None:
    groups, pool = stored
    seen: list[Sample] = []

    def halve(args: Any, samples: list[Sample]) -> Any:
        assert args == "args"
        seen.extend(samples)
        raw = [sample.reward["style"] for sample in samples]
        return raw, np.arange(len(samples), dtype=np.float32)

    processed = process_rewards([groups[2], groups[0]], pool, halve, "args")
    assert processed == ProcessedRewards([[0.5, 0.5], [0.5, 0.5]], [[0.0, 1.0], [2.0, 3.0]])
    assert [(sample.index, sample.metadata["level"], sample.response) for sample in seen] == [
        (4, 2, "ab"), (5, 2, "ab"), (0, 0, "ab"), (1, 0, "ab"),
    ]  # fmt: skip
    assert all(sample.rollout_topk_token_ids is None for sample in seen)
    assert seen[0].rollout_log_probs == [-0.5, -0.25]


def raising(args: Any, samples: list[Sample]) -> Any:  # noqa: ARG001
    raise KeyError("style")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "returned NoneType, allowed: (raw_rewards, rewards)"),
        (([0.0] * 2,), "returned tuple, allowed: (raw_rewards, rewards)"),
        (([0.0] * 2, [0.0]), "returned 1 rewards, allowed: one for each of 2 samples"),
        (([0.0] * 2, [0.0, math.nan]), "no finite number in rewards for sample 1"),
        ((["0"] * 2, [0.0] * 2), "no finite number in raw_rewards for sample 0"),
        ((3.0, [0.0] * 2), "returned raw_rewards of type float"),
        (raising, "raised KeyError: 'style'"),
    ],
)
def test_what_is_no_pair_of_rewards_is_refused_naming_the_flag(stored: Any, answer: Any, words: str) -> None:
    groups, pool = stored
    function = answer if callable(answer) else lambda *_: answer
    with pytest.raises(RewardError, match=r"^--custom-reward-post-process-path ") as caught:
        process_rewards(groups[:1], pool, function, None)
    assert words in caught.value.message
