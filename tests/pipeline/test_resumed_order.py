"""A killed and resumed session trains what an unkilled one trains, in the same order; what it finds, it says first."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.messages import AcceptRequest, decode, encode
from pipeline.planner import BatchPlan, plan_batch
from recovery.audit import audit_run
from recovery.audit_parts import branch_limits, read_branches_raw, split_steps, training_steps
from recovery.branch import read_branches
from recovery.branch_line import BranchLine
from recovery.commit import read_queue_state
from recovery.outlook import look_ahead
from storage.columns import encode_group
from storage.pool import Pool
from storage.queue_view import QueueView
from storage.summary import summarize
from tests.pipeline import mini_stream
from tests.pipeline.mini_stream import BATCH, MEMBERS, ROLLOUTS, run_session
from tests.pipeline.test_crash import kill_session
from vime.data.cursor import PromptTask
from vime.utils.types import Sample

NUM_PROMPTS = 30


def trained(run: Path) -> list[tuple[int, list[int]]]:
    """(rollout, sample ids in their order) of the steps that count, along the newest branch."""
    log = list(training_steps(run))
    counted, _ = split_steps(log, branch_limits(read_branches_raw(run), log))
    return [(rollout, samples) for (_, rollout, _), _, samples in counted]


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, list[int]]]:
    run = tmp_path_factory.mktemp("unkilled")
    run_session(run)
    return trained(run)


@pytest.mark.parametrize(
    ("point", "occurrence"), [("accept", 3), ("train", 4), ("commit", 2), ("training_completed", 1)]
)
def test_a_killed_and_resumed_run_trains_the_same_samples_in_the_same_order(
    tmp_path: Path, unkilled: list[tuple[int, list[int]]], point: str, occurrence: int
) -> None:
    kill_session(tmp_path, point, occurrence)
    run_session(tmp_path)
    assert trained(tmp_path) == unkilled
    assert [samples for _, samples in unkilled] == [
        list(range(rollout * BATCH * MEMBERS, (rollout + 1) * BATCH * MEMBERS)) for rollout in range(ROLLOUTS)
    ]


def ranks_of_plans(run: Path) -> set[int]:
    """For how many data-parallel ranks the run's batches are packed."""
    root = run / "rollout_data" / "pool"
    line = BranchLine(run, QueueView(root).control_dir)
    with Pool.open(root) as pool:
        plans = [decode(pool.read_blob(record.plan_ref), BatchPlan) for record in line.plans]
    return {len(step.ranks) for plan in plans for step in plan.steps}


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_resume_on_another_number_of_data_parallel_ranks_trains_the_same_groups_in_the_same_batches(
    tmp_path: Path,
    unkilled: list[tuple[int, list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    before: int,
    after: int,
) -> None:
    kill_session(tmp_path, "plan", 4, *(["two_ranks"] if before == 2 else []))
    assert ranks_of_plans(tmp_path) == {before}
    monkeypatch.setattr(mini_stream, "PLAN", mini_stream.TWO_RANKS if after == 2 else mini_stream.PLAN)
    run_session(tmp_path)
    assert ranks_of_plans(tmp_path) == {before, after}
    log = list(training_steps(tmp_path))
    counted, _ = split_steps(log, branch_limits(read_branches_raw(tmp_path), log))
    groups = [sorted(step_groups) for _, step_groups, _ in counted]
    assert groups == [sorted({sample // MEMBERS for sample in samples}) for _, samples in unkilled]


def test_surplus_groups_are_trained_next_and_neither_generated_anew_nor_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches are generated ahead; the kill comes when one is trained and committed by nobody."""
    kill_session(tmp_path, "plan", 2)
    ready = audit_run(tmp_path)
    assert ready.pending == 2 * BATCH
    made: list[int] = []
    original = mini_stream.synthetic_group

    def noted(prompt: PromptTask, version: int) -> list[Sample]:
        made.append(prompt.group_index)
        return original(prompt, version)

    monkeypatch.setattr(mini_stream, "synthetic_group", noted)
    run_session(tmp_path)
    assert made == list(range(3 * BATCH, ROLLOUTS * BATCH)), "no accepted group is generated again, and none is skipped"
    assert trained(tmp_path)[1][1] == list(range(BATCH * MEMBERS, 2 * BATCH * MEMBERS))


def test_what_waits_counts_against_the_bound_of_a_resumed_session(tmp_path: Path) -> None:
    kill_session(tmp_path, "plan", 1)
    stream = mini_stream.MiniStream(tmp_path)
    try:
        pending = stream.coordinator.counts().pending
        assert pending == 2 * BATCH
        assert stream.coordinator.lease("producer", 64).work == [], "the bound of groups ahead is reached already"
    finally:
        stream.close()


def test_the_queue_is_counted_before_and_after_going_back_without_a_lock_or_a_write(tmp_path: Path) -> None:
    kill_session(tmp_path, "plan", 4)  # rollouts 0 to 2 are trained, 0 and 1 committed
    stream = mini_stream.MiniStream(tmp_path)
    stream.close()
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    state = read_queue_state(tmp_path, 1)
    outlook = look_ahead(tmp_path, tmp_path / "rollout_data" / "pool", read_branches(tmp_path)[:1], state.trained)
    assert outlook is not None
    assert outlook.before.holds
    assert outlook.after.holds
    assert (outlook.before.trained, outlook.after.trained) == (3 * BATCH, 2 * BATCH)
    assert outlook.after.pending == outlook.before.pending + BATCH
    assert outlook.num_rolled_back == BATCH
    assert any(f"{BATCH} groups trained after the commit went back to pending" in words for words in outlook.words())
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == files


class Interrupted(Exception):
    """In place of a kill, within one process."""


class SometimesFailing(mini_stream.MiniStream):
    """Every seventh group fails for good, and responses have many lengths."""

    async def produce(self) -> None:
        while work := self.coordinator.lease("producer", 3).work:
            self._reach("publish")
            failed = [item for item in work if item.group_index % 7 == 3]
            good = [item for item in work if item.group_index % 7 != 3]
            for item in failed:
                self.coordinator.drop(item.group_index, item.lease, "reward")
            if not good:
                continue
            groups = [of_some_length(item.group_index) for item in good]
            refs = self._publish([(encode_group(group), item.lease) for group, item in zip(groups, good, strict=True)])
            self._reach("accept")
            await self.coordinator.accept(
                [
                    AcceptRequest(item.lease, ref, summarize(group))
                    for item, ref, group in zip(good, refs, groups, strict=True)
                ]
            )


def of_some_length(group_index: int) -> list[Sample]:
    prompt = PromptTask(
        group_index=group_index, first_sample_index=group_index * MEMBERS, epoch=0, row=0, prompt=f"p{group_index}"
    )
    length = random.Random(group_index).randint(1, 30)
    return [
        replace(
            sample,
            tokens=[1, *range(length)],
            response_length=length,
            rollout_log_probs=[-0.5] * length,
            version_spans=[(1, 0, length)],
        )
        for sample in mini_stream.synthetic_group(prompt, 1)
    ]


def test_interruptions_at_random_moments_skip_no_prompt_and_train_none_twice_in_an_epoch(tmp_path: Path) -> None:
    moments = random.Random(5)
    rollouts, num_interruptions = 15, 0
    while num_interruptions < 20:
        left = moments.randint(5, 40)

        def reach(point: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Interrupted(point)

        try:
            run_session(tmp_path, reach, kind=SometimesFailing, rollouts=rollouts)
            break
        except Interrupted:
            num_interruptions += 1
    run_session(tmp_path, kind=SometimesFailing, rollouts=rollouts)
    assert num_interruptions >= 3
    report = audit_run(tmp_path)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], rollouts * BATCH)
    groups = sorted({sample // MEMBERS for _, samples in trained(tmp_path) for sample in samples})
    dropped = [group for group in range(groups[-1] + 1) if group % 7 == 3]
    assert sorted(groups + dropped) == list(range(groups[-1] + 1)), "trained or dropped, each once, none left out"
    assert groups[-1] > 2 * NUM_PROMPTS, "over two epochs"


async def train_one(stream: mini_stream.MiniStream) -> int:
    """Train the next batch under the version after all that the queue has seen; the version."""
    await stream.produce()
    groups = await stream.coordinator.wait_for_groups(BATCH, 5)
    assert groups is not None
    version = stream.coordinator.highest_version() + 1
    plan = plan_batch(groups, mini_stream.PLAN, branch=stream.branch, rollout_id=0, policy_version=version)
    stream.coordinator.record_plan(plan.batch_id, plan.positions, encode(plan))
    stream.coordinator.training_completed(0, version, plan.positions)
    return version


def test_versions_rise_over_five_restarts_though_none_of_them_was_committed(tmp_path: Path) -> None:
    versions = []
    for _ in range(5):
        stream = mini_stream.MiniStream(tmp_path)
        try:
            versions.append(asyncio.run(train_one(stream)))
        finally:
            stream.close()
    assert versions == sorted(set(versions)), "the same groups were trained each time, and rolled back"
