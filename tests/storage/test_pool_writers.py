"""Publications of several threads run side by side, each in a pack of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.wide_groups import GroupShape, lease_bytes, wide_group
from storage.pool import Pool
from storage.pool_writers import MAX_AT_ONCE
from storage.refs import PoolRef

GROUP = wide_group(GroupShape(num_samples=2, num_tokens=20, num_layers=1, head=2))


class Hold:
    """Stops publications of large payloads at their first record until `free` is set."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.held: set[int] = set()
        self.num_held = threading.Semaphore(0)
        self.on = False

    def __call__(self, phase: str) -> None:
        thread = threading.get_ident()
        if self.on and phase == "after_record" and thread not in self.held:
            self.held.add(thread)
            self.num_held.release()
            assert self.free.wait(20)


@pytest.fixture
def hold() -> Iterator[Hold]:
    made = Hold()
    yield made
    made.free.set()


@pytest.fixture
def pool(tmp_path: Path, hold: Hold) -> Iterator[Pool]:
    with Pool.create(tmp_path / "pool", "run", fault=hold) as made:
        yield made


def publish(pool: Pool, name: str) -> Callable[[], PoolRef]:
    return lambda: pool.publish_groups([(GROUP, lease_bytes())], submission_id=name)[0]


def test_as_many_publications_as_there_are_writers_run_at_once_and_one_more_waits(pool: Pool, hold: Hold) -> None:
    hold.on = True
    with ThreadPoolExecutor(MAX_AT_ONCE + 1) as threads:
        publications = [threads.submit(publish(pool, str(number))) for number in range(MAX_AT_ONCE + 1)]
        for _ in range(MAX_AT_ONCE):
            assert hold.num_held.acquire(timeout=20)
        assert not hold.num_held.acquire(timeout=0.05)
        hold.free.set()
        refs = [publication.result(20) for publication in publications]
    assert len({ref.path for ref in refs}) == MAX_AT_ONCE
    assert all(pool.read_header(ref) == GROUP.header for ref in refs)


def test_publications_one_after_the_other_go_through_one_writer(pool: Pool, hold: Hold) -> None:
    hold.on = True
    with ThreadPoolExecutor(2) as threads:
        publications = [threads.submit(publish(pool, str(number))) for number in range(2)]
        for _ in range(2):
            assert hold.num_held.acquire(timeout=20)
        hold.free.set()
        assert len({publication.result(20).path for publication in publications}) == 2
    refs = [publish(pool, name)() for name in ("a", "b", "b")]
    assert len({ref.path for ref in refs}) == 1
    assert refs[1] == refs[2]


def test_a_writer_that_failed_is_used_again_beside_the_other(pool: Pool) -> None:
    with pytest.raises(TypeError):
        pool.publish_blob(None, submission_id="no bytes")  # type: ignore[arg-type]
    first = publish(pool, "a")()
    assert publish(pool, "b")().path == first.path


def test_closing_waits_for_all_that_runs(pool: Pool, hold: Hold) -> None:
    hold.on = True
    with ThreadPoolExecutor(3) as threads:
        publications = [threads.submit(publish(pool, str(number))) for number in range(2)]
        for _ in range(2):
            assert hold.num_held.acquire(timeout=20)
        closing = threads.submit(pool.close)
        hold.free.set()
        refs = [publication.result(20) for publication in publications]
        closing.result(20)
    with Pool.open(pool.root) as other:
        assert all(other.read_header(ref) == GROUP.header for ref in refs)
