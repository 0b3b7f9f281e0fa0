"""What flags ask to be reported of a rollout batch."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from pipeline.batch_report import BatchReport
from pipeline.packing import PackingSettings
from pipeline.planner import BatchPlan, PlanSettings, plan_batch
from storage.columns import encode_group
from storage.memory_parts import PartTable
from storage.memory_pool import MemoryPool
from storage.queue_types import AcceptedGroup
from storage.refs import Lease, lease_to_bytes
from storage.summary import summarize
from tests.pipeline import log_functions
from tests.pipeline.test_progress import record
from vime.settings.parse import parse_settings
from vime.utils.types import Sample

LEASE = lease_to_bytes(Lease("run", "queue", "task", "attempt", 1, "epoch", "token", "worker"))
KEY = ["--reward-key", "score"]
OWN = "tests.pipeline.log_functions"


def sample(group: int, member: int, score: float, kind: str, length: int, num_tool_tokens: int = 0) -> Sample:
    return Sample(
        group_index=group, index=2 * group + member, prompt="p", tokens=[1] * (2 + length), response="r" * length,
        response_length=length, reward={"score": score, "kind": kind}, rollout_log_probs=[-0.5] * length,
        loss_mask=[0] * num_tool_tokens + [1] * (length - num_tool_tokens), version_spans=[(1, 0, length)],
        metadata={"round_number": 1 + num_tool_tokens}, status=Sample.Status.COMPLETED,
    )  # fmt: skip


GROUPS = [
    [sample(0, 0, 1.0, "right", 4), sample(0, 1, 0.0, "wrong", 8, num_tool_tokens=2)],
    [sample(1, 0, 0.0, "no answer", 6), sample(1, 1, 0.0, "wrong", 6)],
]


@pytest.fixture
def stored() -> Any:
    """A function that opens the pool with the batch, and the batch's plan."""
    parts: PartTable[bytes] = PartTable()
    with closing(MemoryPool("run", parts)) as pool:
        refs = pool.publish_groups([(encode_group(g, reward_key="score"), LEASE) for g in GROUPS], submission_id="s")
        groups = [
            AcceptedGroup(position, position, ref, summarize(group, reward_key="score"))
            for position, (group, ref) in enumerate(zip(GROUPS, refs, strict=True))
        ]
        settings = PlanSettings(2, 4, PackingSettings(num_ranks=1, max_tokens=64), True, True)
        yield lambda: MemoryPool("run", parts), plan_batch(groups, settings, branch="b", rollout_id=3, policy_version=1)


async def reported(stored: tuple[Any, BatchPlan], *argv: str) -> dict[str, float]:
    opened, plan = stored
    report = BatchReport(parse_settings([*KEY, *argv]), lambda: "args", opened)
    return report.numbers(await report.samples(plan))


async def test_nothing_is_read_unless_a_flag_asks_for_it(stored: tuple[Any, BatchPlan]) -> None:
    def refuse() -> Any:
        raise AssertionError("the pool was opened")

    assert await reported((refuse, stored[1])) == {}


async def test_pass_at_k_is_over_the_groups(stored: tuple[Any, BatchPlan]) -> None:
    assert await reported(stored, "--log-passrate") == {"pass@1": 0.25, "pass@2": 0.5}


async def test_correct_samples_have_lengths_of_their_own(stored: tuple[Any, BatchPlan]) -> None:
    found = await reported(stored, "--log-correct-samples")
    assert (found["correct/share"], found["correct/response_len/mean"]) == (0.25, 4.0)


async def test_turns_are_counted_with_and_without_the_tokens_of_tools(stored: tuple[Any, BatchPlan]) -> None:
    found = await reported(stored, "--log-multi-turn")
    assert (found["multi_turn/rounds/mean"], found["multi_turn/rounds/max"]) == (1.5, 3.0)
    assert (found["multi_turn/response_len/mean"], found["multi_turn/sampled_len/mean"]) == (6.0, 5.5)


async def test_categories_of_the_reward_are_shares(stored: tuple[Any, BatchPlan]) -> None:
    found = await reported(stored, "--log-reward-category", "kind")
    assert found == {
        "error_cat/no answer": 0.25, "error_cat/right": 0.25, "error_cat/wrong": 0.5
    }  # fmt: skip


async def test_a_function_of_ones_own_gets_samples_and_metrics_and_replaces_the_report(
    stored: tuple[Any, BatchPlan],
) -> None:
    opened, plan = stored
    log_functions.CALLS.clear()
    report = BatchReport(
        parse_settings([*KEY, "--custom-rollout-log-function-path", f"{OWN}.report"]), lambda: "args", opened
    )
    samples = await report.samples(plan)
    assert await report.tell(record(), samples) == (True, "")
    ((rollout_id, args, seen, metrics, _),) = log_functions.CALLS
    assert (rollout_id, args, [each.index for each in seen]) == (6, "args", [0, 1, 2, 3])
    assert metrics["reward_mean"] == 0.25


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("report_beside", ""),
        ("report_badly", f"--custom-rollout-log-function-path {OWN}.report_badly raised KeyError: 'board'"),
    ],
)
async def test_vimes_report_stays_where_the_function_does_not_replace_it(name: str, warning: str) -> None:
    settings = parse_settings(["--custom-rollout-log-function-path", f"{OWN}.{name}"])
    report = BatchReport(settings, lambda: "args", lambda: pytest.fail("not needed"))
    assert await report.tell(record(), []) == (False, warning)
