"""Parts of columns out of a pool in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from storage import memory_columns
from storage.columns import ColumnSpec, EncodedGroup, encode_group, read_header
from storage.memory_parts import PartTable
from storage.memory_pool import MemoryPool
from storage.memory_queue import MemoryQueue
from storage.refs import GroupRef
from storage.step_log import StepLog
from tests.storage.queue_helpers import new_memory_queue, publish, samples_of, submit
from vime.errors import StorageError


class CountingParts(PartTable[bytes]):
    """Counts what is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[int] = []
        self.num_bytes = 0

    def get(self, key: str, numbers: Sequence[int]) -> list[bytes]:
        self.fetched += numbers
        found = super().get(key, numbers)
        self.num_bytes += sum(map(len, found))
        return found

    def put(self, entries: Mapping[str, Sequence[bytes]]) -> None:
        super().put(entries)


def with_routes(folder: Path, pool: MemoryPool) -> GroupRef:
    """A group of two members with 3 and 3 rows, and routes [2 layers, 6 rows, 2] that count up."""
    with MemoryQueue(pool, StepLog(folder), lease_seconds=60) as queue:
        submit(queue, 0, 1)
        group = encode_group(samples_of(0))
        header = read_header(group.header)
        spec = ColumnSpec("routes", "uint8", [2, 6, 2], [0, 3, 6], layout="layer_major")
        changed = msgspec.structs.replace(header, columns=[*header.columns, spec])
        columns = {**group.columns, "routes": np.arange(24, dtype=np.uint8).reshape(2, 6, 2)}
        lease = queue.lease("w", 1)[0].lease
        (ref,) = pool.publish_groups(
            [(EncodedGroup(msgspec.msgpack.encode(changed), columns), lease)], submission_id="x"
        )
        return ref


def test_rows_of_a_member_are_counted(tmp_path: Path) -> None:
    pool, queue = new_memory_queue(tmp_path, 1)
    ref = publish(pool, queue.lease("w", 1)[0])
    counts = [pool.num_rows(ref, column, 1) for column in ("tokens", "loss_mask", "top_k_ids")]
    assert counts == [5, 3, 0]


def test_rows_of_a_member_are_those_of_the_whole_column(tmp_path: Path) -> None:
    pool, queue = new_memory_queue(tmp_path, 1)
    ref = publish(pool, queue.lease("w", 1)[0])
    assert pool.read_rows(ref, "tokens", 1).tolist() == [1, 2, 10, 11, 12]
    assert pool.read_rows(ref, "tokens", 1, 1, 3).tolist() == [2, 10]
    assert pool.read_rows(ref, "loss_mask", 0, 3).tolist() == []


def test_layers_of_a_member_are_cut_out_of_the_whole_column(tmp_path: Path) -> None:
    pool = MemoryPool("run", PartTable())
    ref = with_routes(tmp_path, pool)
    assert pool.read_layers(ref, "routes", 1, range(1, 2), 1, 3).tolist() == [[[20, 21], [22, 23]]]


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda pool, ref: pool.read_rows(ref, "routes", 0), "'routes' is layer_major"),
        (lambda pool, ref: pool.read_layers(ref, "tokens", 0, range(1)), "'tokens' is row_major"),
        (lambda pool, ref: pool.read_layers(ref, "routes", 0, range(1, 3)), "has 2 layers, range\\(1, 3\\)"),
        (lambda pool, ref: pool.read_rows(ref, "tokens", 2), "has 2 members, member 2"),
        (lambda pool, ref: pool.read_rows(ref, "loss_mask", 0, 2, 4), "has 3 rows of member 0, range\\(2, 4\\)"),
        (lambda pool, ref: pool.read_rows(ref, "heads", 0), r"has no columns \['heads'\]"),
    ],
)
def test_parts_that_do_not_exist_are_refused(tmp_path: Path, read: object, message: str) -> None:
    pool = MemoryPool("run", PartTable())
    ref = with_routes(tmp_path, pool)
    assert callable(read)
    with pytest.raises(StorageError, match=message):
        read(pool, ref)


def test_the_rows_of_a_member_of_a_large_column_are_fetched_without_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_columns, "SPLIT_BYTES", 24)
    parts = CountingParts()
    pool = MemoryPool("run", parts)
    ref = with_routes(tmp_path, pool)
    whole = np.arange(24, dtype=np.uint8).reshape(2, 6, 2)
    parts.num_bytes = 0
    pool.num_rows(ref, "routes", 1)
    header_bytes = parts.num_bytes
    assert np.array_equal(pool.read_layers(ref, "routes", 1, range(2)), whole[:, 3:])
    assert np.array_equal(pool.read_layers(ref, "routes", 1, range(1, 2), 1, 3), whole[1:, 4:])
    assert parts.num_bytes - header_bytes == whole.nbytes // 2
    assert pool.read_rows(ref, "tokens", 0, 1).tolist() == [2, 10, 11, 12]
    assert parts.num_bytes - header_bytes == whole.nbytes // 2 + 5 * 4
    found = pool.read_group(ref)
    assert np.array_equal(found.columns["routes"], whole)
    assert found.columns["tokens"].tolist() == [1, 2, 10, 11, 12] * 2


def test_a_small_column_is_fetched_once_while_its_members_are_read(tmp_path: Path) -> None:
    parts = CountingParts()
    pool = MemoryPool("run", parts)
    ref = with_routes(tmp_path, pool)
    parts.fetched.clear()
    for member in range(2):
        for column in ("tokens", "loss_mask"):
            pool.read_rows(ref, column, member)
    assert parts.fetched == [0, 1, 2]
