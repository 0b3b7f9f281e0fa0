"""The end of a journal is damaged at any byte: what was accepted before it stays, and the cut is reported."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from recovery.audit import replay_journals
from storage.columns import encode_group
from storage.pool import Pool
from storage.positions import PositionRanges
from storage.queue import GroupQueue
from storage.queue_types import GroupResult, GroupReturn, Stage
from storage.repair import Repair, cut_damaged_tail
from storage.summary import summarize
from tests.storage.queue_helpers import finish, new_queue, publish, samples_of
from vime.errors import CorruptDataError

Damage = Callable[[bytes, int], bytes]
MAGIC = b"SLMTXN01"
DAMAGES: dict[str, Damage] = {
    "cut short": lambda data, at: data[:at],
    "zeros to the end": lambda data, at: data[:at] + bytes(len(data) - at),
    "zeros beyond the end": lambda data, at: data[:at] + bytes(len(data) - at + 4096),
    "garbage to the end": lambda data, at: data[:at] + bytes(byte ^ 0xA5 for byte in data[at:]),
    "garbage beyond the end": lambda data, at: data[:at] + b"\xff" * (len(data) - at + 100),
}


ENCODED = [encode_group(samples_of(group_index)) for group_index in range(4)]
SUMMARIES = [summarize(samples_of(group_index)) for group_index in range(4)]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A queue whose last three transactions accept groups 0, 1 and 2."""
    root = tmp_path_factory.mktemp("original") / "pool"
    pool, queue = new_queue(root, 4)
    with pool, queue:
        for leased in queue.lease("w", 3):
            finish(pool, queue, leased)
    return root


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(original, tmp_path / "pool"))


@pytest.fixture
def in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for thousands of cuts; in memory where that is possible, so that none waits for a disk."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    shared_memory = Path("/dev/shm")
    with TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else tmp_path) as folder:
        yield Path(folder)


def journal_of(root: Path) -> Path:
    (path,) = (root / "queues").glob("*/control/journal.log")
    return path


def starts(data: bytes) -> list[int]:
    """Where transactions begin, and the end of the last."""
    found = [at for at in range(len(data)) if data.startswith(MAGIC, at)]
    return [*found, len(data)]


def repairs(root: Path) -> list[Repair]:
    path = root / "vime" / "repairs.jsonl"
    return [Repair(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass
class Campaign:
    """Damages the journal of one queue over and over, and opens it each time."""

    pool: Pool
    name: str
    """Of the kind of damage."""

    def __post_init__(self) -> None:
        self.journal = journal_of(self.pool.root)
        self.data = self.journal.read_bytes()
        self.starts = starts(self.data)
        self.last_three = range(self.starts[-4], len(self.data))
        """Bytes of the last three transactions."""
        self.brought_to_end: set[int] = set()
        """How many of them were left whole when the groups were last brought to their end."""

    @contextmanager
    def opened_after_damage(self, at: int) -> Iterator[tuple[GroupQueue, int]]:
        """The queue as a new coordinator finds it, and how many of the last three transactions were left whole."""
        self.journal.write_bytes(DAMAGES[self.name](self.data, at))
        shutil.rmtree(self.pool.control_dir / "cut", ignore_errors=True)
        (self.pool.control_dir / "repairs.jsonl").unlink(missing_ok=True)
        with GroupQueue.open(self.pool, owner="after", lease_seconds=60) as queue:
            yield queue, sum(start <= at for start in self.starts[-3:])

    def check_opens_with_what_was_accepted_before(self, at: int) -> None:
        with self.opened_after_damage(at) as (queue, whole):
            facts = queue.facts()
            assert facts.accepted == {index: index for index in range(whole)}
            assert (facts.in_flight, facts.fresh) == (list(range(whole, 3)), [3])
        for repair in repairs(self.pool.root):
            kept = DAMAGES[self.name](self.data, at)
            kept_bytes = self.starts[-4 + whole]
            assert (repair.kept_bytes, repair.cut_bytes) == (kept_bytes, len(kept) - kept_bytes)
            assert Path(repair.cut_to).read_bytes() == kept[kept_bytes:]
            assert self.journal.read_bytes().startswith(self.data[:kept_bytes])

    def check_nothing_is_lost_and_nothing_accepted_twice(self, at: int) -> None:
        """All groups are there after the damage, and each ends with one result, readable, at its place.

        What a queue does once it is open depends on its journal alone. So the groups are brought to their end the
        first time that so many transactions were left whole, and at every hundredth byte; in between it is enough
        that the journal is what it was then.
        """
        with self.opened_after_damage(at) as (queue, whole):
            facts = queue.facts()
            assert facts.num_groups == 4
            assert facts.accepted == ({0: 0, 1: 1, 2: 2} if whole == 3 else {})
            kept, journal = self.data[: self.starts[-4 + whole]], self.journal.read_bytes()
            assert journal.startswith(kept)
            opening = journal[len(kept) :]
            assert (opening.count(MAGIC), opening.count(b'"type":'), opening.count(b'"type":"Epoch"')) == (1, 1, 1)
            if whole in self.brought_to_end and at % 100:
                return
            self.bring_to_end(queue, at, whole)
        state = replay_journals(self.pool.root)
        assert (state.accepted_twice, len(state.accepted)) == ([], 4)
        self.brought_to_end.add(whole)

    def bring_to_end(self, queue: GroupQueue, at: int, whole: int) -> None:
        """Generate and accept what waits, and read all results."""
        waiting = queue.lease("w", 4)
        assert [group.stage for group in waiting] == [
            Stage.PARTIAL if group.group_index < 2 and 1 <= whole < 3 else Stage.FRESH for group in waiting
        ]
        items = [(ENCODED[group.group_index], group.lease) for group in waiting]
        refs = self.pool.publish_groups(items, submission_id=f"{at}")
        queue.accept_many(
            [
                GroupResult(group.lease, ref, SUMMARIES[group.group_index])
                for group, ref in zip(waiting, refs, strict=True)
            ]
        )
        accepted = queue.accepted()
        assert [group.position for group in accepted] == [0, 1, 2, 3]
        assert sorted(group.group_index for group in accepted) == [0, 1, 2, 3]


@contextmanager
def campaign(pool_to_copy: Path, folder: Path, name: str) -> Iterator[Campaign]:
    with Pool.open(shutil.copytree(pool_to_copy, folder / "pool")) as pool:
        yield Campaign(pool, name)


@pytest.mark.parametrize("name", DAMAGES)
def test_whole_transactions_before_the_damage_stay(root: Path, name: str) -> None:
    data = journal_of(root).read_bytes()
    copy = root / "queues" / "x" / "control" / "journal.log"
    copy.parent.mkdir(parents=True)
    for at in range(starts(data)[-4] + 1, len(data), 41):
        damaged = DAMAGES[name](data, at)
        copy.write_bytes(damaged)
        end = max(start for start in starts(data) if start <= at)
        repair = cut_damaged_tail(copy, root / "vime")
        assert copy.read_bytes() == data[:end]
        if repair is None:
            assert damaged == data[:end]
        else:
            assert Path(repair.cut_to).read_bytes() == damaged[end:]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_queue_with_a_damaged_end_opens_with_what_was_accepted_before_it(
    original: Path, tmp_path: Path, name: str
) -> None:
    with campaign(original, tmp_path, name) as damaged:
        last = damaged.starts[-2]
        for at in (damaged.starts[-4] + 500, last, len(damaged.data) - 1):
            damaged.check_opens_with_what_was_accepted_before(at)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", DAMAGES)
def test_a_queue_damaged_at_every_byte_opens_with_what_was_accepted_before_it(
    original: Path, in_memory: Path, name: str
) -> None:
    with campaign(original, in_memory, name) as damaged:
        for at in damaged.last_three:
            damaged.check_opens_with_what_was_accepted_before(at)


def test_a_cut_is_reported_in_the_log_and_in_a_file(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = journal_of(root)
    data = journal.read_bytes()
    journal.write_bytes(data + bytes(4096))
    with caplog.at_level(logging.WARNING), Pool.open(root) as pool:
        GroupQueue.open(pool, owner="after", lease_seconds=60).close()
    assert "the last 4096 bytes were damaged" in caplog.text
    assert "groups that they accepted will be generated again" in caplog.text
    (repair,) = repairs(root)
    assert (repair.cut_bytes, repair.kept_bytes, repair.num_transactions) == (4096, len(data), len(starts(data)) - 1)
    assert Path(repair.cut_to).read_bytes() == bytes(4096)


def test_a_sound_journal_is_left_alone(root: Path) -> None:
    assert cut_damaged_tail(journal_of(root), root / "vime") is None
    assert repairs(root) == []


@pytest.mark.parametrize("back", [2, 3, 5])
def test_damage_before_the_end_is_refused_and_nothing_is_cut(root: Path, back: int) -> None:
    journal = journal_of(root)
    data = bytearray(journal.read_bytes())
    at = starts(bytes(data))[-1 - back]
    data[at + 60] ^= 1
    journal.write_bytes(data)
    following = starts(bytes(data))[-back]
    message = rf"transaction at byte {at} of {len(data)} is damaged, with a whole one at {following}"
    with Pool.open(root) as pool, pytest.raises(CorruptDataError, match=message):
        GroupQueue.open(pool, owner="after", lease_seconds=60)
    assert journal.read_bytes() == data
    assert repairs(root) == []


def test_training_that_the_cut_has_undone_is_refused(root: Path) -> None:
    """Else a group that is accepted later would take the position, and count as trained."""
    journal = journal_of(root)
    data = journal.read_bytes()
    journal.write_bytes(data[:-1] + b"\0")
    with Pool.open(root) as pool, GroupQueue.open(pool, owner="after", lease_seconds=60) as queue:
        queue.reopen(PositionRanges([(0, 1)]))
        with pytest.raises(CorruptDataError, match=r"has accepted 2\. Resume from an older commit; .*repairs.jsonl"):
            queue.reopen(PositionRanges([(0, 2)]))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A queue whose last three transactions give two groups back, lease them again, and accept three together."""
    root = tmp_path_factory.mktemp("mixed") / "pool"
    pool, queue = new_queue(root, 4)
    with pool, queue:
        first, second, third = queue.lease("w", 3)
        returns = [GroupReturn(group.lease, publish(pool, group), Stage.PARTIAL, 1) for group in (first, second)]
        queue.yield_groups(returns)
        results = [
            GroupResult(group.lease, publish(pool, group), summarize(samples_of(group.group_index)))
            for group in [*queue.lease("w", 2), third]
        ]
        queue.accept_many(results)
    return root


@pytest.mark.parametrize("name", ["cut short", "zeros to the end"])
def test_damage_around_the_last_three_transactions_loses_nothing_and_accepts_nothing_twice(
    mixed: Path, tmp_path: Path, name: str
) -> None:
    with campaign(mixed, tmp_path, name) as damaged:
        places = {min(start + offset, len(damaged.data)) for start in damaged.starts[-3:] for offset in (-1, 0, 60)}
        for at in sorted(places):
            damaged.check_nothing_is_lost_and_nothing_accepted_twice(at)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_at_every_byte_of_the_last_three_transactions_loses_nothing_and_accepts_nothing_twice(
    mixed: Path, in_memory: Path, name: str
) -> None:
    with campaign(mixed, in_memory, name) as damaged:
        for at in damaged.last_three:
            damaged.check_nothing_is_lost_and_nothing_accepted_twice(at)
