"""Parts of groups come back exactly, only what they need is read and checked, and what isn't there is never data."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import straw

from benchmarks.shard_read import read_shard
from benchmarks.wide_groups import GroupShape, lease_bytes, wide_group
from storage import group_records, live, pack_file
from storage.columns import EncodedGroup
from storage.pool import Pool
from storage.refs import PoolRef
from vime.errors import CorruptDataError, StorageError

SHAPE = GroupShape(num_samples=4, num_tokens=1500, num_layers=8, head=16)
GROUP = wide_group(SHAPE)
ROUTE_ROWS = SHAPE.num_tokens - 1


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with Pool.create(tmp_path / "pool", "run") as made:
        yield made


@pytest.fixture
def ref(pool: Pool) -> PoolRef:
    return pool.publish_groups([(GROUP, lease_bytes())], submission_id="group")[0]


@pytest.fixture
def head_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for groups that are too large for one record."""
    monkeypatch.setattr(group_records, "ONE_RECORD_BYTES", 0)


@pytest.fixture(params=[True, False], ids=["head_apart", "one_record"])
def either_layout(request: pytest.FixtureRequest) -> None:
    if request.param:
        request.getfixturevalue("head_apart")


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that were asked for; none is taken."""
    asked: list[float] = []
    monkeypatch.setattr(pack_file, "sleep", asked.append)
    monkeypatch.setattr(live, "sleep", asked.append)
    return asked


class Reads:
    """Stands before the kernel's read: counts bytes, and changes what it gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        self.change: Callable[[memoryview], None] | None = None
        """Changes what was read."""
        self.counts: list[int] = []
        """How much the next reads give; after them, all."""
        self._read = os.preadv
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = self._read(descriptor, buffers, offset)
        self.num_bytes += count
        if self.change is not None:
            self.change(buffers[0])
        return self.counts.pop(0) if self.counts else count


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, ref: PoolRef) -> Reads:  # noqa: ARG001
    return Reads(monkeypatch)


def routes_of(member: int, layers: range, start: int, stop: int) -> np.ndarray:  # type: ignore[type-arg]
    first = member * ROUTE_ROWS
    return GROUP.columns["routes"][layers.start : layers.stop, first + start : first + stop]


@pytest.mark.parametrize(("start", "stop"), [(0, None), (0, 1), (511, 513), (1491, 1492), (700, 700)])
def test_rows_of_a_member_come_back_exactly(pool: Pool, ref: PoolRef, start: int, stop: int | None) -> None:
    for name in ("top_k_ids", "top_k_log_probs", "loss_mask", "sampler_log_probs"):
        stored = GROUP.columns[name][2 * SHAPE.num_responses : 3 * SHAPE.num_responses]
        found = pool.read_rows(ref, name, 2, start, stop)
        assert found.dtype == stored.dtype
        assert np.array_equal(found, stored[start:stop])


@pytest.mark.parametrize(("layers", "start", "stop"), [(range(8), 0, ROUTE_ROWS), (range(3, 5), 500, 1030)])
def test_layers_of_a_member_come_back_exactly(pool: Pool, ref: PoolRef, layers: range, start: int, stop: int) -> None:
    found = pool.read_layers(ref, "routes", 3, layers, start, stop)
    assert np.array_equal(found, routes_of(3, layers, start, stop))


def test_a_whole_group_comes_back_exactly(pool: Pool, ref: PoolRef) -> None:
    found = pool.read_group(ref)
    assert found.header == GROUP.header
    assert list(found.columns) == list(GROUP.columns)
    assert all(np.array_equal(found.columns[name], array) for name, array in GROUP.columns.items())


@pytest.mark.usefixtures("either_layout")
def test_groups_of_one_transaction_are_told_apart(pool: Pool) -> None:
    groups = [wide_group(GroupShape(2, 40 + number, 2, 2, 4), number) for number in range(3)]
    items = [(group, lease_bytes(number)) for number, group in enumerate(groups)]
    for group, found in zip(groups, pool.publish_groups(items, submission_id="three"), strict=True):
        for name, array in group.columns.items():
            assert np.array_equal(pool.read_columns(found, [name])[name], array)


@pytest.mark.usefixtures("head_apart")
def test_groups_of_one_transaction_share_one_look_at_its_index(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    inspect = straw.SharedFilesystemStore.inspect_segment

    def counting(self: straw.SharedFilesystemStore, ref: straw.SegmentRef) -> dict[str, Any]:
        looks.append(ref)
        return inspect(self, ref)

    monkeypatch.setattr(straw.SharedFilesystemStore, "inspect_segment", counting)
    small = wide_group(GroupShape(num_tokens=20, num_layers=1, head=0))
    refs = pool.publish_groups([(small, lease_bytes(number)) for number in range(5)], submission_id="five")
    for ref in refs:
        pool.read_columns(ref, ["tokens"])
    assert len(looks) == 1


def test_rows_of_a_member_are_counted_without_reading_them(pool: Pool, ref: PoolRef, reads: Reads) -> None:
    assert pool.num_rows(ref, "top_k_ids", 2) == SHAPE.num_responses
    assert pool.num_rows(ref, "routes", 2) == ROUTE_ROWS
    assert pool.num_rows(ref, "top_p_ids", 2) == 0
    pool.read_rows(ref, "tokens", 2)
    before = reads.num_bytes
    assert pool.num_rows(ref, "loss_mask", 1) == SHAPE.num_responses
    assert reads.num_bytes == before


@pytest.mark.usefixtures("either_layout")
def test_columns_without_rows_or_bytes_come_back(pool: Pool) -> None:
    group = wide_group(GroupShape(2, 8 + 0, 1, 0, 1))
    ref = pool.publish_groups([(group, lease_bytes())], submission_id="empty")[0]
    assert pool.read_columns(ref, ["top_k_ids"])["top_k_ids"].shape == (0, 1)
    assert pool.read_layers(ref, "routes", 1, range(1)).shape == (1, 7, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool, ref: pool.read_rows(ref, "nothing", 0), r"has no columns \['nothing'\], it has .*'tokens'"),
        (lambda pool, ref: pool.read_rows(ref, "tokens", 4), "has 4 members, member 4 was asked for"),
        (lambda pool, ref: pool.read_rows(ref, "tokens", 0, 5, 1501), r"has 1500 rows of member 0, range\(5, 1501\)"),
        (lambda pool, ref: pool.read_rows(ref, "routes", 0), "'routes' is layer_major.*Use read_rows or read_layers"),
        (lambda pool, ref: pool.read_layers(ref, "tokens", 0, range(1)), "'tokens' is row_major"),
        (lambda pool, ref: pool.read_layers(ref, "routes", 0, range(7, 9)), "has 8 layers"),
    ],
)
def test_parts_that_do_not_exist_are_refused(
    pool: Pool, ref: PoolRef, call: Callable[[Pool, PoolRef], object], message: str
) -> None:
    with pytest.raises(StorageError, match=message):
        call(pool, ref)


def test_each_of_eight_ranks_reads_little_more_than_its_shard_and_holds_no_more(tmp_path: Path) -> None:
    shape = GroupShape(num_tokens=2048, num_layers=8, head=0)
    group = wide_group(shape)
    with Pool.create(tmp_path / "wide", "run") as writing:
        ref = writing.publish_groups([(group, lease_bytes())], submission_id="wide")[0]
    read_bytes = 0
    for rank in range(8):
        with pytest.MonkeyPatch.context() as patch, Pool.open(tmp_path / "wide") as pool:
            pool.read_rows(ref, "loss_mask", 0, 0, 1)
            reads = Reads(patch)
            tracemalloc.start()
            layers = range(rank // 4 * 4, rank // 4 * 4 + 4)
            shard = [pool.read_layers(ref, "routes", member, layers) for member in range(rank % 4, 8, 4)]
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            num_bytes = sum(array.nbytes for array in shard)
            assert num_bytes == group.columns["routes"].nbytes // 8
            assert reads.num_bytes == num_bytes
            assert peak <= 1.5 * num_bytes
            read_bytes += reads.num_bytes
    assert read_bytes == group.columns["routes"].nbytes


def test_a_range_of_tokens_reads_at_most_two_chunks_more_in_each_layer(pool: Pool, ref: PoolRef, reads: Reads) -> None:
    pool.read_layers(ref, "routes", 1, range(2, 4), 700, 800)
    assert reads.num_bytes == 2 * 512 * SHAPE.top_k


def test_equal_reads_come_from_the_cache_and_are_read_only(pool: Pool, ref: PoolRef, reads: Reads) -> None:
    first = pool.read_rows(ref, "top_k_ids", 0)
    num_bytes = reads.num_bytes
    assert pool.read_rows(ref, "top_k_ids", 0) is not None
    assert reads.num_bytes == num_bytes
    with pytest.raises(ValueError, match="read-only"):
        first[0, 0] = 1


def test_zeros_at_the_end_of_a_growing_file_are_read_again_until_the_data_is_there(
    pool: Pool, ref: PoolRef, reads: Reads, waits: list[float]
) -> None:
    def zeros_twice(content: memoryview) -> None:
        if len(waits) < 2:
            content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)

    reads.change = zeros_twice
    assert np.array_equal(pool.read_layers(ref, "routes", 0, range(1)), routes_of(0, range(1), 0, ROUTE_ROWS))
    assert waits == [*pack_file.WAITS_S[:2]]


def test_zeros_that_stay_are_refused_and_never_data(pool: Pool, ref: PoolRef, reads: Reads, waits: list[float]) -> None:
    def zeros(content: memoryview) -> None:
        content[:] = bytes(len(content))

    reads.change = zeros
    with pytest.raises(CorruptDataError, match=r"pack, bytes \d+ to \d+: the 4096 bytes of chunk 0 are zeros after 7"):
        pool.read_layers(ref, "routes", 0, range(1))
    assert waits == [*pack_file.WAITS_S]
    reads.change = None
    assert np.array_equal(pool.read_layers(ref, "routes", 0, range(1)), routes_of(0, range(1), 0, ROUTE_ROWS))


def test_a_file_that_is_still_too_short_is_waited_for_and_then_refused(
    pool: Pool, ref: PoolRef, reads: Reads, waits: list[float]
) -> None:
    reads.counts = [5, 0]
    assert np.array_equal(pool.read_rows(ref, "loss_mask", 0), GROUP.columns["loss_mask"][: SHAPE.num_responses])
    assert waits == [pack_file.WAITS_S[0]]
    reads.counts = [5, 0] * 7
    with pytest.raises(CorruptDataError, match=r"only 5 of 1492 bytes are there after 7 reads in 3\.9 s"):
        pool.read_rows(ref, "loss_mask", 1)


def test_a_read_that_is_repeated_sees_the_file_that_is_there_by_then(
    pool: Pool, ref: PoolRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, right = pool.root / ref.path, pool.root / "right"
    pool.read_rows(ref, "tokens", 0)
    pack.rename(right)
    pack.write_bytes(bytes(right.stat().st_size))
    monkeypatch.setattr(pack_file, "sleep", lambda _: right.exists() and right.replace(pack))
    assert np.array_equal(pool.read_rows(ref, "loss_mask", 0), GROUP.columns["loss_mask"][: SHAPE.num_responses])


def test_only_touched_chunks_are_checked(pool: Pool, ref: PoolRef) -> None:
    pack = pool.root / ref.path
    content = bytearray(pack.read_bytes())
    place = content.index(routes_of(0, range(1), 600, 601).tobytes())
    content[place] ^= 1
    pack.write_bytes(content)
    with Pool.open(pool.root) as fresh:
        for rows in ((0, 512), (1024, ROUTE_ROWS)):
            assert np.array_equal(fresh.read_layers(ref, "routes", 0, range(1), *rows), routes_of(0, range(1), *rows))
        with pytest.raises(CorruptDataError, match="the 4096 bytes of chunk 1 don't match their digest") as caught:
            fresh.read_layers(ref, "routes", 0, range(1), 511, 513)
    assert str(pack) in str(caught.value)
    assert "expected XXH3" in str(caught.value)


def test_a_pack_that_was_reclaimed_is_told_at_once(pool: Pool, ref: PoolRef, waits: list[float]) -> None:
    pool.read_rows(ref, "tokens", 0)
    (pool.root / ref.path).unlink()
    with pytest.raises(StorageError, match="No such file or directory"):
        pool.read_rows(ref, "tokens", 1)
    with Pool.open(pool.root) as fresh, pytest.raises(StorageError, match="No such file or directory"):
        fresh.read_rows(ref, "tokens", 0)
    assert waits == []


def test_a_mount_that_is_away_for_a_while_is_waited_for(
    pool: Pool, ref: PoolRef, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    opened = os.open

    def open_later(path: Path, flags: int, *mode: int) -> int:
        if str(path).endswith(".pack") and len(waits) < 3:
            raise OSError(107, "Transport endpoint is not connected")
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", open_later)
    assert len(pool.read_rows(ref, "tokens", 0)) == SHAPE.num_tokens
    assert waits == [*live.RETRY_WAITS_S[:3]]


def test_a_mount_that_stays_away_is_an_error_that_says_how_long(
    pool: Pool, ref: PoolRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.read_rows(ref, "tokens", 0)

    def never(path: Path, flags: int, *mode: int) -> int:  # noqa: ARG001
        raise OSError(107, "Transport endpoint is not connected")

    monkeypatch.setattr(os, "open", never)
    with pytest.raises(StorageError, match=r"Transport endpoint is not connected \(tried 8 times in 31\.5 s\)"):
        pool.read_rows(ref, "tokens", 1)


@pytest.mark.usefixtures("either_layout")
def test_a_group_whose_digests_are_of_other_columns_is_refused(pool: Pool) -> None:
    other = EncodedGroup(wide_group(GroupShape(2, 40, 0, 0, 0)).header, wide_group(GroupShape(2, 41, 0, 0, 0)).columns)
    ref = pool.publish_groups([(other, lease_bytes())], submission_id="other")[0]
    with pytest.raises(CorruptDataError, match=r"the columns .*'tokens'.* have \d+ bytes together, expected \d+"):
        pool.read_columns(ref, ["tokens"])


def test_a_shard_of_the_benchmark_is_an_eighth_of_the_routes_and_a_quarter_of_the_heads(
    pool: Pool, ref: PoolRef
) -> None:
    arrays = read_shard(pool, ref, SHAPE, context=False)
    assert sum(array.nbytes for array in arrays if array.ndim == 3) == GROUP.columns["routes"].nbytes // 8
    heads = GROUP.columns["top_k_ids"].nbytes + GROUP.columns["top_k_log_probs"].nbytes
    assert sum(array.nbytes for array in arrays if array.ndim == 2) == heads // 4
