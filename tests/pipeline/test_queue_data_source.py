"""The queue as a data source of a custom rollout function."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.coordinator import Coordinator
from pipeline.coordinator_config import CoordinatorConfig
from pipeline.group_stamps import unstamped
from pipeline.messages import AcceptReply, AcceptRequest, LeaseReply
from pipeline.queue_data_source import DataSourceSettings
from pipeline.transports.memory import open_memory_coordinator
from storage.checks import EnqueueRequirements, check_enqueue
from storage.columns import encode_group
from storage.memory_parts import PartTable
from storage.memory_pool import MemoryPool
from storage.queue_types import GroupReturn
from tests.pipeline.mini_stream import write_prompts
from vime.data.prompts import PromptSource
from vime.data.queue_data_source import QueueDataSource
from vime.errors import RestoreError, SampleError, StorageError
from vime.utils.types import Sample

MEMBERS = 2


def check(samples: Sequence[Sample]) -> None:
    check_enqueue(samples, EnqueueRequirements())


class LocalQueue:
    """The coordinator without a process boundary."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.beats: list[int] = []
        self.versions: list[int] = []
        self.beaten = threading.Event()
        self.failure: Exception | None = None

    def lease(self, worker_id: str, max_groups: int, policy_version: int) -> LeaseReply:
        self.versions.append(policy_version)
        return self.coordinator.lease(worker_id, max_groups, policy_version)

    def heartbeat(self, leases: list[bytes]) -> list[bool]:
        if self.failure is not None:
            raise self.failure
        self.beats.append(len(leases))
        self.beaten.set()
        return self.coordinator.heartbeat(leases)

    def accept(self, requests: list[AcceptRequest]) -> list[AcceptReply]:
        return asyncio.run(self.coordinator.accept(requests))

    def yield_groups(self, returns: list[GroupReturn]) -> list[bool]:
        return self.coordinator.yield_groups(returns)

    def release(self, group_index: int, lease: bytes, reason: str) -> None:
        self.coordinator.release(group_index, lease, reason)

    def drop(self, group_index: int, lease: bytes, reason: str) -> None:
        self.coordinator.drop(group_index, lease, reason)


class Parts:
    """A coordinator in memory and what data sources of it need."""

    def __init__(self, folder: Path, lease_seconds: float = 60.0, max_groups: int = 6) -> None:
        self.table: PartTable[bytes] = PartTable()
        self.folder, self.lease_seconds = folder, lease_seconds
        self.coordinator = open_memory_coordinator(
            run_id="run",
            parts=self.table,
            step_log_folder=folder / "log",
            source=PromptSource(write_prompts(folder), n_samples_per_prompt=MEMBERS),
            config=CoordinatorConfig("main", [], 20, max_groups, lease_seconds),
        )
        self.queue = LocalQueue(self.coordinator)
        self.policy_version = 0

    def source(self, worker_id: str = "reader") -> QueueDataSource:
        settings = DataSourceSettings(worker_id, "main", 30, MEMBERS, self.lease_seconds, self.folder / "state")
        pool = MemoryPool("run", self.table)
        return QueueDataSource(
            self.queue,
            pool,
            settings,
            check=check,
            encode=encode_group,
            policy_version=lambda: self.policy_version,
        )


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    parts = Parts(tmp_path)
    yield parts
    parts.coordinator.close()


@pytest.fixture
def source(parts: Parts) -> Iterator[QueueDataSource]:
    with parts.source() as source:
        yield source


def respond(sample: Sample, tokens: int = 2, version: int = 1, *, finished: bool = True) -> None:
    """What a generate function does to a sample."""
    start = sample.response_length
    sample.tokens = [*(sample.tokens or [1]), *range(5, 5 + tokens)]
    sample.response_length += tokens
    sample.rollout_log_probs = [*(sample.rollout_log_probs or []), *[-0.5] * tokens]
    sample.version_spans = [*sample.version_spans, (version, start, start + tokens)]
    sample.weight_versions = [*sample.weight_versions, str(version)]
    sample.status = Sample.Status.COMPLETED if finished else Sample.Status.ABORTED
    sample.reward = 1.0 if finished else None


def test_groups_come_with_stamps_and_the_number_of_members(source: QueueDataSource) -> None:
    first, second = source.get_samples(2)
    assert [sample.index for sample in first] == [0, 1]
    assert [sample.group_index for sample in second] == [1, 1]
    stamps: dict[str, Any] = vars(first[0])
    assert isinstance(stamps["_queue_lease"], bytes)
    assert (stamps["_queue_generation_start"], stamps["_queue_branch"]) == (0, "main")
    assert stamps["_queue_source_positions"] == []
    assert len(source) == 30


def test_accepted_groups_reach_the_trainer_once(source: QueueDataSource, parts: Parts) -> None:
    groups = source.get_samples(2)
    for sample in (sample for group in groups for sample in group):
        respond(sample)
    assert source.accept_samples(groups) == [0, 1]
    assert vars(groups[1][0])["_queue_receipt"] == 1
    assert parts.coordinator.counts().pending == 2
    waiting = asyncio.run(parts.coordinator.wait_for_groups(2, 1.0)) or []
    assert [group.summary.rewards for group in waiting] == [[1.0, 1.0]] * 2


def test_a_sample_that_cannot_be_trained_is_not_accepted(source: QueueDataSource, parts: Parts) -> None:
    (group,) = source.get_samples(1)
    respond(group[0])
    with pytest.raises(SampleError, match="status is pending"):
        source.accept_samples([group])
    assert parts.coordinator.counts().pending == 0


def test_a_partial_group_is_gone_on_with_by_another_reader_before_fresh_prompts(
    source: QueueDataSource, parts: Parts
) -> None:
    group, fresh = source.get_samples(2)
    for sample in group:
        respond(sample, finished=False)
    assert source.add_samples([group, fresh]) == [True, True]
    with parts.source("other") as other:
        again, prompt = other.get_samples(2)
        assert [sample.group_index for sample in (again[0], prompt[0])] == [0, 1]
        assert [sample.tokens for sample in again] == [sample.tokens for sample in group]
        assert vars(again[0])["_queue_generation_start"] == len(again[0].tokens)
        assert vars(again[0])["_queue_lease"] != vars(group[0])["_queue_lease"]
        assert [sample.response_length for sample in prompt] == [0, 0]
    identity = parts.coordinator.identity()
    assert identity.holds
    assert identity.in_flight == 2


def test_a_completed_group_comes_before_a_partial_one(source: QueueDataSource) -> None:
    partial, completed = source.get_samples(2)
    for sample in partial:
        respond(sample, finished=False)
    for sample in completed:
        respond(sample, version=9)
    source.add_samples([partial, completed])
    assert [group[0].group_index for group in source.get_samples(2)] == [1, 0]


def test_a_group_that_cannot_be_stored_goes_back_as_it_was_leased(source: QueueDataSource, parts: Parts) -> None:
    (group,) = source.get_samples(1)
    for sample in group:
        respond(sample, finished=False)
    assert group[1].rollout_log_probs is not None
    group[1].rollout_log_probs.pop()
    assert source.add_samples([group]) == [True]
    (again,) = source.get_samples(1)
    assert (again[0].group_index, again[0].response_length) == (0, 0)
    assert parts.coordinator.counts().dropped == {}


def test_groups_without_a_lease_or_with_two_are_refused(source: QueueDataSource) -> None:
    first, second = source.get_samples(2)
    with pytest.raises(SampleError, match="have 2 leases, allowed: one"):
        source.add_samples([[first[0], second[0]]])
    with pytest.raises(SampleError, match="have 0 leases, allowed: one"):
        source.accept_samples([[Sample(group_index=0, index=0)]])


def test_new_samples_of_a_hook_belong_to_the_lease_of_their_group(source: QueueDataSource) -> None:
    (group,) = source.get_samples(1)
    made = Sample(group_index=0, index=1, prompt="p")
    for sample in (group[0], made):
        respond(sample)
    assert source.accept_samples([[group[0], made]]) == [0]


def test_groups_are_leased_under_the_version_that_requests_are_made_under(
    source: QueueDataSource, parts: Parts
) -> None:
    source.get_samples(1)
    parts.policy_version = 4
    source.get_samples(1)
    assert (parts.queue.versions, source.policy_version) == ([0, 4], 4)


def test_dropped_groups_are_counted_by_reason(source: QueueDataSource, parts: Parts) -> None:
    source.drop_samples(source.get_samples(2), "zero_std")
    assert parts.coordinator.counts().dropped == {"zero_std": 2}


def test_fewer_groups_come_when_the_queue_is_full_and_none_at_its_end(tmp_path: Path) -> None:
    parts = Parts(tmp_path, max_groups=3)
    with parts.source() as source:
        groups = source.get_samples(9)
        assert len(groups) == 3
        for sample in (sample for group in groups for sample in group):
            respond(sample)
        positions = source.accept_samples(groups)
        for step in range(20):
            parts.coordinator.training_completed(step, 1, [position for position in positions if position is not None])
            groups = source.get_samples(9)
            if not groups:
                break
            for sample in (sample for group in groups for sample in group):
                respond(sample)
            positions = source.accept_samples(groups)
        assert parts.coordinator.counts().trained == 20
    parts.coordinator.close()


def test_leases_are_kept_alive_in_the_background(tmp_path: Path) -> None:
    parts = Parts(tmp_path, lease_seconds=0.3)
    with parts.source() as source:
        (group,) = source.get_samples(1)
        for _ in range(5):
            parts.queue.beaten.clear()
            assert parts.queue.beaten.wait(5)
        for sample in group:
            respond(sample)
        assert source.accept_samples([group]) == [0]
    parts.coordinator.close()


def test_a_lost_lease_is_let_go_and_its_result_is_refused(source: QueueDataSource, parts: Parts) -> None:
    (group,) = source.get_samples(1)
    parts.coordinator.release(0, vars(group[0])["_queue_lease"], "taken away")
    source._keeper.beat()
    assert source._keeper.held() == {}
    for sample in group:
        respond(sample)
    assert source.accept_samples([group]) == [None]


def test_a_failed_heartbeat_is_told_by_the_next_call(tmp_path: Path) -> None:
    parts = Parts(tmp_path, lease_seconds=0.3)
    parts.queue.failure = StorageError("the queue is closed")
    with parts.source() as source:
        source.get_samples(1)
        source._keeper._thread.join(5)
        with pytest.raises(StorageError, match="the queue is closed"):
            source.get_samples(1)
    parts.coordinator.close()


def test_closing_gives_everything_back(parts: Parts) -> None:
    with parts.source() as source:
        source.get_samples(3)
    assert [work.group_index for work in parts.coordinator.lease("w", 3).work] == [0, 1, 2]


def test_the_origin_of_tokens_is_kept_segment_by_segment(source: QueueDataSource) -> None:
    (group,) = source.get_samples(1)
    respond(group[0], version=3)
    assert vars(unstamped(group[0], "main"))["queue_policy_segments"] == [
        {"start": 0, "stop": 3, "branch": "main", "reported_versions": ["3"]}
    ]
    assert not [name for name in vars(unstamped(group[0], "main")) if name.startswith("_queue_")]


def test_metadata_is_saved_and_loaded_by_rollout(source: QueueDataSource, parts: Parts) -> None:
    source.metadata["seen"] = 3
    source.save(2)
    with parts.source() as other:
        other.load()
        assert other.metadata == {}
        other.load(2)
        assert other.metadata == {"seen": 3}
        with pytest.raises(RestoreError, match=r"data_source_7.json: the data source's state can't be read"):
            other.load(7)
