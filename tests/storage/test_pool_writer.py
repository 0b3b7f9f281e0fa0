"""What was acknowledged stays, and publishing goes on, whatever happens to the store that writes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import straw
from straw import errors

import storage.pool
from storage import live, pool_writer
from storage.pool import Pool
from storage.refs import PoolRef
from vime.errors import DiskFullError, StorageError


class Faults:
    """I/O phases at which the next publications fail."""

    def __init__(self) -> None:
        self.pending: list[tuple[str, Exception]] = []
        self.watch: Callable[[str], None] = lambda _: None

    def __call__(self, phase: str) -> None:
        self.watch(phase)
        if self.pending and self.pending[0][0] == phase:
            raise self.pending.pop(0)[1]


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def pool(tmp_path: Path, faults: Faults) -> Iterator[Pool]:
    with Pool.create(tmp_path / "pool", "run", fault=faults) as made:
        yield made


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that were asked for; none is taken."""
    asked: list[float] = []
    monkeypatch.setattr(live, "sleep", asked.append)
    return asked


def packs(pool: Pool) -> list[Path]:
    return sorted((pool.root / "raw").rglob("*.pack"))


def read_elsewhere(pool: Pool, ref: PoolRef) -> bytes:
    with Pool.open(pool.root) as other:
        return other.read_blob(ref)


UNPLUGGED = OSError(107, "Transport endpoint is not connected")
RESTARTED = OSError(512, "Unknown error 512")


@pytest.mark.parametrize("phase", ["after_record", "before_footer", "before_file_sync", "after_data_sync"])
@pytest.mark.parametrize("error", [UNPLUGGED, RESTARTED, errors.IndeterminateCommit("sync outcome unknown")])
def test_a_store_that_failed_is_replaced_and_the_publication_repeated(
    pool: Pool, faults: Faults, waits: list[float], phase: str, error: Exception
) -> None:
    before = pool.publish_blob(b"before", submission_id="before")
    faults.pending = [(phase, error), (phase, error)]
    ref = pool.publish_blob(b"payload", submission_id="x")
    assert read_elsewhere(pool, ref) == b"payload"
    assert read_elsewhere(pool, before) == b"before"
    assert waits == [*live.RETRY_WAITS_S[: len(waits)]]
    assert ref.path != before.path
    assert not faults.pending


def test_a_publication_that_was_recorded_before_the_failure_is_not_written_again(pool: Pool, faults: Faults) -> None:
    faults.pending = [("after_publication_receipt", UNPLUGGED)]
    ref = pool.publish_blob(b"payload", submission_id="x")
    assert [pool.root / ref.path] == packs(pool)
    assert read_elsewhere(pool, ref) == b"payload"


def test_descriptors_that_a_remount_made_useless_are_replaced(pool: Pool) -> None:
    ref = pool.publish_blob(b"before", submission_id="before")
    writer = Path(ref.path).parent.name
    for name in os.listdir("/proc/self/fd"):
        try:
            if writer in os.readlink(f"/proc/self/fd/{name}"):
                os.close(int(name))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    after = pool.publish_blob(b"after", submission_id="after")
    assert [read_elsewhere(pool, ref), read_elsewhere(pool, after)] == [b"before", b"after"]


def test_nothing_is_written_where_the_pool_is_not_mounted(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pool.publish_blob(b"before", submission_id="before")
    away = tmp_path / "away"
    pool.root.rename(away)
    pauses: list[float] = []

    def mount_at_the_third(wait_s: float) -> None:
        pauses.append(wait_s)
        assert not pool.root.exists()
        if len(pauses) == 3:
            away.rename(pool.root)

    monkeypatch.setattr(live, "sleep", mount_at_the_third)
    ref = pool.publish_blob(b"payload", submission_id="x")
    assert len(pauses) == 3
    assert read_elsewhere(pool, ref) == b"payload"


def test_what_was_written_beside_the_pool_is_not_acknowledged(
    pool: Pool, faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mount goes away when a fresh writer has found it in place, and comes back when that has written."""
    away, beside = tmp_path / "away", tmp_path / "beside"

    def check_and_leave(root: Path) -> None:
        pool_writer.check_in_place(root)
        if not beside.exists():
            root.rename(away)

    def come_back(phase: str) -> None:
        if phase == "after_publication_receipt" and away.exists():
            pool.root.rename(beside)
            away.rename(pool.root)

    monkeypatch.setattr(storage.pool, "check_in_place", check_and_leave)
    faults.watch = come_back
    ref = pool.publish_blob(b"payload", submission_id="x")
    assert list(beside.rglob("*.pack")), "straw wrote where no pool was"
    monkeypatch.undo()
    assert read_elsewhere(pool, ref) == b"payload"


def test_a_writer_closes_though_the_client_of_its_mount_has_died(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool.publish_blob(b"payload", submission_id="x")

    def not_connected(_path: Path) -> bool:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", not_connected)
        pool.close()
    assert "is not marked as ended" in caplog.text
    assert os.strerror(errno.ENOTCONN) in caplog.text


def test_a_mount_that_stays_away_is_an_error_that_names_it(pool: Pool, tmp_path: Path) -> None:
    pool.root.rename(tmp_path / "away")
    with pytest.raises(StorageError, match=r"pool\.json is not there: its file system is not mounted \(tried 8"):
        pool.publish_blob(b"payload", submission_id="x")
    (tmp_path / "away").rename(pool.root)


def test_repeats_are_bounded_and_the_error_says_how_many(pool: Pool, faults: Faults, waits: list[float]) -> None:
    faults.pending = [("after_record", UNPLUGGED)] * 100
    with pytest.raises(StorageError, match=r"publish x: .*\(tried 8 times in 31\.5 s\) \(pool .*Check the mount"):
        pool.publish_blob(b"payload", submission_id="x")
    assert waits == [*live.RETRY_WAITS_S]
    faults.pending = []
    assert read_elsewhere(pool, pool.publish_blob(b"payload", submission_id="x")) == b"payload"


def test_a_writer_that_was_retired_by_others_is_replaced(pool: Pool) -> None:
    first = pool.publish_blob(b"one", submission_id="1")
    pool.store.retire_writer(Path(first.path).parent.name)
    second = pool.publish_blob(b"two", submission_id="2")
    assert [read_elsewhere(pool, ref) for ref in (first, second)] == [b"one", b"two"]


def test_a_full_disk_is_told_at_once_and_the_same_call_succeeds_when_there_is_space(
    pool: Pool, faults: Faults, waits: list[float]
) -> None:
    before = pool.publish_blob(b"before", submission_id="before")
    faults.pending = [("after_record", errors.QuotaExceeded("No space left on device (os error 28)"))]
    with pytest.raises(DiskFullError, match=r"is full or over quota; at least 7 bytes are needed, \d+ bytes are free"):
        pool.publish_blob(b"payload", submission_id="x")
    assert waits == []
    ref = pool.publish_blob(b"payload", submission_id="x")
    assert [read_elsewhere(pool, before), read_elsewhere(pool, ref)] == [b"before", b"payload"]


@pytest.mark.parametrize("phase", ["writer_gate:before_file_sync", "writer_gate:before_journal_write"])
def test_a_writer_that_could_not_even_begin_on_a_full_disk_is_replaced(pool: Pool, faults: Faults, phase: str) -> None:
    faults.pending = [(phase, errors.QuotaExceeded("No space left on device (os error 28)"))]
    with pytest.raises(DiskFullError):
        pool.publish_blob(b"payload", submission_id="x")
    assert read_elsewhere(pool, pool.publish_blob(b"payload", submission_id="x")) == b"payload"


def test_the_writer_is_replaced_after_so_many_publications_and_all_stay_readable(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_writer, "MAX_PUBLICATIONS", 3)
    refs = {data: pool.publish_blob(data, submission_id=data.decode()) for data in (b"%d" % n for n in range(10))}
    assert [read_elsewhere(pool, ref) for ref in refs.values()] == list(refs)
    assert len(packs(pool)) == 4


def test_a_pack_gets_nothing_more_once_it_has_its_size(tmp_path: Path) -> None:
    with Pool.create(tmp_path / "small", "run", segment_bytes=1) as pool:
        refs = [pool.publish_blob(b"%d" % number, submission_id=str(number)) for number in range(3)]
        assert len({ref.path for ref in refs}) == len(packs(pool)) == 3


DYING = """
import os, signal, sys, msgspec
from storage import pool_writer
from storage.pool import Pool
pool_writer.MAX_PUBLICATIONS = 2
num_phases = 0
def die(phase):
    global num_phases
    num_phases += 1
    if num_phases == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
with Pool.open(sys.argv[1], fault=die) as pool:
    for number in range(6):
        (ref,) = pool.publish_prompts([b"%d" % number], submission_id=str(number))
        print(msgspec.json.encode(ref).decode(), flush=True)
"""


def acknowledged_before_a_kill(root: Path, phase: int) -> tuple[int, list[PoolRef]]:
    """Exit status of a process that publishes and dies at an I/O phase, and the references that it got."""
    Pool.create(root, "run").close()
    command = [sys.executable, "-c", DYING, str(root), str(phase)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=100)
    return done.returncode, [msgspec.json.decode(line, type=PoolRef) for line in done.stdout.splitlines()]


def check_kill(root: Path, phase: int) -> None:
    status, refs = acknowledged_before_a_kill(root, phase)
    assert status == -signal.SIGKILL
    with Pool.open(root) as pool:
        assert [pool.read_blob(ref) for ref in refs] == [b"%d" % number for number in range(len(refs))]
        assert pool.read_blob(pool.publish_blob(b"next", submission_id="next")) == b"next"


@pytest.mark.parametrize("phase", [45, 75, 95, 130])
def test_a_kill_while_writers_are_replaced_loses_nothing_that_was_acknowledged(tmp_path: Path, phase: int) -> None:
    check_kill(tmp_path / "pool", phase)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_kill_at_every_third_phase_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    for phase in range(1, 200, 3):
        check_kill(tmp_path / str(phase), phase)


def test_a_pool_that_is_only_read_writes_nothing(pool: Pool) -> None:
    ref = pool.publish_blob(b"payload", submission_id="x")
    before = {path: path.stat().st_mtime_ns for path in pool.root.rglob("*")}
    assert read_elsewhere(pool, ref) == b"payload"
    assert {path: path.stat().st_mtime_ns for path in pool.root.rglob("*")} == before


GROWTH = """
import sys, psutil
from benchmarks.wide_groups import GroupShape, lease_bytes, wide_group
from storage import pool_writer
from storage.pool import Pool
groups = [(wide_group(GroupShape(1, 10, 0, 0, 0)), lease_bytes(number)) for number in range(64)]
pool_writer.MAX_PUBLICATIONS = int(sys.argv[2])
resident = psutil.Process().memory_info
with Pool.create(sys.argv[1], "run") as pool:
    for number in range(32):
        pool.publish_groups(groups, submission_id=str(number))
        if number == 7:
            before = resident().rss
    print(resident().rss - before)
"""


def memory_growth(root: Path, max_publications: int) -> int:
    command = [sys.executable, "-c", GROWTH, str(root), str(max_publications)]
    return int(subprocess.run(command, check=True, capture_output=True, timeout=100).stdout)


def test_memory_does_not_grow_with_every_publication(tmp_path: Path) -> None:
    one_writer = memory_growth(tmp_path / "one", 10**9)
    replaced = memory_growth(tmp_path / "many", 256)
    assert one_writer > 2 << 20, "straw no longer remembers publications: the replacement can go"
    assert replaced < one_writer / 3


def test_eight_producers_lose_no_record_and_share_no_file(tmp_path: Path) -> None:
    Pool.create(tmp_path / "pool", "run").close()
    refs: dict[bytes, PoolRef] = {}

    def produce(producer: int) -> None:
        with Pool.open(tmp_path / "pool") as pool:
            for start in range(0, 60, 20):
                data = [b"%d:%d" % (producer, number) for number in range(start, start + 20)]
                refs.update(zip(data, pool.publish_prompts(data, submission_id=f"{start}"), strict=True))

    run_all([lambda producer=producer: produce(producer) for producer in range(8)])
    assert len(refs) == 8 * 60
    with Pool.open(tmp_path / "pool") as pool:
        assert all(pool.read_blob(ref) == data for data, ref in refs.items())
    packs_of = [{ref.path for data, ref in refs.items() if data.startswith(b"%d:" % number)} for number in range(8)]
    assert [len(paths) for paths in packs_of] == [1] * 8
    assert len(set().union(*packs_of)) == 8


PRODUCER = """
import sys, msgspec
from storage.pool import Pool
refs = []
with Pool.open(sys.argv[1]) as pool:
    for start in range(0, 1000, 50):
        data = [b"%d:%d" % (int(sys.argv[2]), number) for number in range(start, start + 50)]
        refs += pool.publish_prompts(data, submission_id=str(start))
open(f"{sys.argv[1]}/refs.{sys.argv[2]}", "wb").write(msgspec.msgpack.encode(refs))
"""


@pytest.mark.slow
@pytest.mark.multiproc
def test_eight_processes_with_a_thousand_records_each_lose_none(tmp_path: Path) -> None:
    Pool.create(tmp_path / "pool", "run").close()
    processes = [
        subprocess.Popen([sys.executable, "-c", PRODUCER, str(tmp_path / "pool"), str(number)]) for number in range(8)
    ]
    assert [process.wait(100) for process in processes] == [0] * 8
    with Pool.open(tmp_path / "pool") as pool:
        for number in range(8):
            refs = msgspec.msgpack.decode((pool.root / f"refs.{number}").read_bytes(), type=list[PoolRef])
            assert [pool.read_blob(ref) for ref in refs] == [b"%d:%d" % (number, record) for record in range(1000)]


def test_nobody_else_can_write_to_or_retire_the_segment_of_a_writer_at_work(tmp_path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold(phase: str) -> None:
        if phase == "after_record":
            entered.set()
            assert leave.wait(20)

    Pool.create(tmp_path / "pool", "run").close()
    with Pool.open(tmp_path / "pool", fault=hold) as pool, Pool.open(tmp_path / "pool") as second:
        writing = threading.Thread(target=lambda: pool.publish_blob(b"first", submission_id="1"))
        writing.start()
        assert entered.wait(20)
        (pack,) = packs(pool)
        try:
            with pytest.raises(errors.WriterBusy):
                second.store.retire_writer(pack.parent.name)
            other = second.publish_blob(b"second", submission_id="1")
        finally:
            leave.set()
            writing.join()
        assert pool.root / other.path != pack
        assert len(packs(pool)) == 2


def test_a_writer_that_was_retired_cannot_write_to_its_segment_any_more(tmp_path: Path) -> None:
    Pool.create(tmp_path / "pool", "run").close()
    store = straw.SharedFilesystemStore(tmp_path / "pool", "run")
    store.publish([straw.Record("x", b"x")], submission_id="1")
    with Pool.open(tmp_path / "pool") as pool:
        pool.store.retire_writer(store.writer_id)
    with pytest.raises(errors.WriterFenced):
        store.publish([straw.Record("x", b"x")], submission_id="2")


def run_all(works: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
