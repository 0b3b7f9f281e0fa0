"""The queue as the disk tells it, against what the open queue and straw itself say."""

import os
import random
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from storage import segment_list
from storage.holder import process_lives, read_coordinator
from storage.journal_replay import replay, segment_folders
from storage.pool import Pool
from storage.positions import PositionRanges
from storage.queue import GroupQueue
from storage.queue_types import LeasedGroup
from storage.queue_view import QueueView
from tests.storage.queue_helpers import finish, new_queue, submit
from vime.errors import CorruptDataError, StorageError


def snapshot(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Path -> size, time of change and content, of everything below `root`."""
    return {
        str(path.relative_to(root)): (
            path.stat().st_size,
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in root.rglob("*")
    }


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def act_at_random(pool: Pool, queue: GroupQueue, clock: Clock, choices: random.Random) -> None:
    """Some hundred transitions of every kind."""
    held: list[LeasedGroup] = []
    trained: list[int] = []
    for _ in range(120):
        match choices.choice(["submit", "lease", "lease", "finish", "finish", "drop", "release", "expire", "rotate"]):
            case "submit":
                start = queue.cursor().next_group_index
                submit(queue, start, start + choices.randint(1, 3))
            case "lease":
                held += queue.lease(f"worker-{choices.randint(0, 1)}", choices.randint(1, 3))
            case "finish" if held:
                trained.append(finish(pool, queue, held.pop(0)).position)
            case "drop" if held:
                queue.drop(held.pop(0).lease, choices.choice(["reward_none", "engine"]))
            case "release" if held:
                queue.release([held.pop(0).lease], "test")
            case "expire":
                clock.now_s += 100
                held.clear()
            case "rotate":
                queue.rotate("branch", PositionRanges.of(trained))


@pytest.mark.parametrize("seed", range(4))
def test_the_disk_tells_the_same_as_the_open_queue_after_any_schedule(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_list, "MAX_SEGMENT_GROUPS", 5)
    clock = Clock()
    pool, queue = new_queue(tmp_path / "pool", 3, clock=clock)
    with pool, queue:
        act_at_random(pool, queue, clock, random.Random(seed))
        view = QueueView(tmp_path / "pool")
        assert view.facts() == queue.facts()
        for segment in view.opened:
            table = queue._session._segments.at(segment.entry.index).coordinator.tasks
            compared = ("state", "generation", "lease", "spec")
            assert {
                task_id: {name: task[name] for name in compared if name != "lease" or task["state"] == "leased"}
                for task_id, task in segment.replay.tasks.items()
            } == {
                task_id: {name: task[name] for name in compared if name != "lease" or task["state"] == "leased"}
                for task_id, task in table.items()
            }
        leased = [group for segment in view.opened for group in segment.groups() if group.state == "leased"]
        assert all(group.worker is not None and group.worker.startswith("worker-") for group in leased)


def test_a_restart_of_the_coordinator_leaves_its_leases_waiting(tmp_path: Path) -> None:
    pool, queue = new_queue(tmp_path / "pool", 3)
    with pool:
        queue.lease("worker", 2)
        queue.close()
        with GroupQueue.open(pool, owner="test", lease_seconds=60):
            view = QueueView(tmp_path / "pool")
    assert [group.state for group in view.opened[0].groups()] == ["waiting", "waiting", "fresh"]
    assert [event.what for event in view.opened[0].history(0)] == ["submitted", "leased", "revoked"]


def test_looking_into_an_open_queue_takes_no_lock_and_changes_no_byte(tmp_path: Path) -> None:
    pool, queue = new_queue(tmp_path / "pool", 3)
    with pool, queue:
        receipt = finish(pool, queue, queue.lease("worker", 1)[0])
        before = snapshot(tmp_path)
        with Pool.open(tmp_path / "pool") as reader:
            view = QueueView(tmp_path / "pool")
            group = view.opened[0].group(0)
            assert group is not None
            assert (group.position, group.state) == (receipt.position, "accepted")
            assert group.result_ref is not None
            assert reader.read_group(group.result_ref).columns["tokens"].tolist()
            assert reader.read_blob(group.prompt_ref)
            read_coordinator(view.control_dir)
        assert snapshot(tmp_path) == before
        queue.lease("worker", 1)


def test_a_journal_cut_at_any_byte_shows_a_state_that_was_once_true(tmp_path: Path) -> None:
    pool, queue = new_queue(tmp_path / "pool", 2)
    states = []
    with pool, queue:
        for step in (lambda: None, lambda: finish(pool, queue, queue.lease("worker", 1)[0])):
            step()
            states.append(QueueView(tmp_path / "pool").facts())
        journal = next((tmp_path / "pool" / "queues").glob("*/control/journal.log"))
        size_before = journal.stat().st_size
        queue.lease("worker", 1)
        states.append(QueueView(tmp_path / "pool").facts())
    whole = journal.read_bytes()
    for end in range(size_before, len(whole), 97):
        journal.write_bytes(whole[:end])
        assert QueueView(tmp_path / "pool").facts() == states[1]


def test_a_damaged_journal_is_told_with_its_path(tmp_path: Path) -> None:
    pool, queue = new_queue(tmp_path / "pool", 2)
    with pool:
        queue.close()
    journal = next((tmp_path / "pool" / "queues").glob("*/control/journal.log"))
    journal.write_bytes(journal.read_bytes() + b"\0" * 64)
    with pytest.raises(CorruptDataError, match=r"journal\.log: the journal can't be read"):
        QueueView(tmp_path / "pool")


def test_an_unknown_event_about_a_task_is_refused_and_others_change_nothing() -> None:
    assert replay([{"type": "ReaderRetired", "worker_id": "w"}]).tasks == {}
    with pytest.raises(CorruptDataError, match="an event 'Teleported'"):
        replay([{"type": "Teleported", "task_id": "prompt:0"}])


def test_a_folder_without_a_queue_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="holds no queue"):
        QueueView(tmp_path)


def test_the_holder_is_alive_while_its_process_is(tmp_path: Path) -> None:
    assert read_coordinator(tmp_path) is None
    pool, queue = new_queue(tmp_path / "pool")
    with pool, queue:
        holder = read_coordinator(pool.control_dir)
        assert holder is not None
        assert (holder.epoch, holder.owner, holder.pid, holder.host) == (1, "test", os.getpid(), socket.gethostname())
        assert holder.alive is True


def test_a_process_that_ended_or_began_later_is_not_the_one_meant() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait(timeout=60)
    assert not process_lives(child.pid, since=time.time())
    assert not process_lives(os.getpid(), since=time.time() - 10 * 365 * 86400.0)


def test_a_holder_on_another_host_is_not_judged(tmp_path: Path) -> None:
    pool, queue = new_queue(tmp_path / "pool")
    with pool, queue:
        folder = shutil.copytree(pool.control_dir, tmp_path / "copy")
    epoch = next((folder / "epochs").glob("*.json"))
    epoch.write_text(epoch.read_text().replace(socket.gethostname(), "elsewhere"))
    holder = read_coordinator(folder)
    assert holder is not None
    assert holder.alive is None


def test_a_queue_that_is_reclaimed_while_folders_are_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Path.glob
    kept, gone = tmp_path / "queues" / "kept", tmp_path / "queues" / "gone"
    kept.mkdir(parents=True)
    (kept / "run.json").write_text('{"queue_id": "groups-kept"}')
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [gone / "run.json", *listed(folder, pattern)])
    assert segment_folders(tmp_path) == {"groups-kept": kept}
