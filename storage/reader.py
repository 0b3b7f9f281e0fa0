"""Reading from a pool: whole records through straw, columns and parts of them by their own chunk digests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import straw

from storage.byte_cache import ByteCache
from storage.chunk_layout import Run, joined
from storage.columns import DTYPES, Array, EncodedGroup
from storage.group_head import read_head
from storage.group_index import (
    Column,
    Extent,
    GroupIndex,
    LoadedColumn,
    StoredColumn,
    read_group_index,
    read_payload,
    record_extents,
)
from storage.live import Live
from storage.pack_file import PackFile
from storage.refs import GroupRef, PoolRef
from vime.errors import StorageError

CACHE_BYTES = 64 << 20
CACHED_TRANSACTIONS = 64
"""Transactions whose extents are remembered: straw parses the whole index of one at each look."""
CACHED_PUBLICATIONS = 16
"""Publications whose records are remembered: many prompts are one publication, and are read one after the other."""


class ReadingStore:
    """An open store of straw with a reader that remembers the indexes of packs."""

    def __init__(self, store: straw.SharedFilesystemStore, session: Any) -> None:
        self.read_record = session.read_record
        self._store, self._session = store, session
        self.extents = lru_cache(CACHED_TRANSACTIONS)(self._read_extents)
        self.members = lru_cache(CACHED_PUBLICATIONS)(self._read_members)

    def _read_extents(self, ref: straw.SegmentRef) -> tuple[Extent, ...]:
        return record_extents(ref, self._store.inspect_segment(ref)["records"])

    def _read_members(self, ref: straw.RecordSetRef) -> tuple[straw.RecordRef, ...]:
        return tuple(straw.RecordRef.from_dict(member) for member in self._session.manifest(ref)["records"])

    @classmethod
    @contextmanager
    def opened(cls, store: straw.SharedFilesystemStore) -> Iterator[ReadingStore]:
        """Around `store`, which is not closed: to close a store, straw makes the folder of a writer."""
        with store.read_session() as session:
            yield cls(store, session)


class GroupReader:
    """Reads records, columns, rows and layers of a pool, and keeps one bounded cache for the process. Thread-safe.

    A small group is read as a whole when any part of it is.

    All methods raise `CorruptDataError` for bytes that don't match their digest and `StorageError` for storage that
    fails longer than the repeats last. Arrays come read-only: equal reads share them through the cache.
    """

    def __init__(self, live: Live[ReadingStore], root: Path, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._live, self._root = live, root
        self._cache = ByteCache(cache_bytes)

    def read_blob(self, ref: PoolRef) -> bytes:
        """A prompt or a blob."""
        what = f"read {self._root / ref.path}"
        return self._live.call(what, lambda store: read_payload(store, ref), hopeless=lambda: self._is_gone(ref))

    def read_header(self, ref: GroupRef) -> bytes:
        """The header of a group."""
        return read_head(self.read_blob(ref)).header

    def read_columns(self, ref: GroupRef, names: Sequence[str]) -> dict[str, Array]:
        """Whole columns of a group by name, shaped as stored; only these are read."""
        index = self._index(ref)
        columns = {name: index.column(name) for name in names}
        return {
            name: self._read(ref, column, column.layout.everything(), column.spec.shape)
            for name, column in columns.items()
        }

    def read_group(self, ref: GroupRef) -> EncodedGroup:
        """The whole group: header and all columns."""
        index = self._index(ref)
        return EncodedGroup(index.header, self.read_columns(ref, list(index.columns)))

    def read_rows(self, ref: GroupRef, column: str, member: int, start: int = 0, stop: int | None = None) -> Array:
        """Rows `start:stop` of a member in a column whose rows come first: [stop - start, ...].

        Only the chunks that hold them are read.
        """
        (rows,) = self._part(ref, column, member, None, start, stop)
        return cast(Array, rows)

    def num_rows(self, ref: GroupRef, column: str, member: int) -> int:
        """Rows of a member in a column; 0 in a column that the group lacks, and where absent members have no rows."""
        found = self._index(ref).columns.get(column)
        return 0 if found is None else found.layout.num_rows(member)

    def read_layers(
        self, ref: GroupRef, column: str, member: int, layers: range, start: int = 0, stop: int | None = None
    ) -> Array:
        """Rows `start:stop` of a member in some layers of a column whose layers come first: [L, stop - start, ...].

        Only the chunks that hold them are read.
        """
        return self._part(ref, column, member, layers, start, stop)

    def _part(self, ref: GroupRef, name: str, member: int, layers: range | None, start: int, stop: int | None) -> Array:
        column = self._index(ref).column(name)
        layers, rows = _checked_part(f"{ref.path}: column {name!r}", column, member, layers, start, stop)
        key = ref, name, member, layers, rows
        part: Array | None = self._cache.get(key)
        if part is None:
            shape = [len(layers), len(rows), *column.spec.shape[column.spec.row_axis + 1 :]]
            part = self._read(ref, column, column.layout.rows(layers, member, rows), shape)
            self._cache.put(key, part, part.nbytes)
        return part

    def _index(self, ref: GroupRef) -> GroupIndex:
        index: GroupIndex | None = self._cache.get(ref)
        if index is None:
            what = f"read {self._root / ref.path}"
            index = self._live.call(
                what, lambda store: read_group_index(store, ref), hopeless=lambda: self._is_gone(ref)
            )
            self._cache.put(ref, index, index.num_bytes)
        return index

    def _read(self, ref: GroupRef, column: Column, runs: Iterator[Run], shape: Sequence[int]) -> Array:
        array = np.empty(shape, DTYPES[column.spec.dtype])
        found = list(joined(runs))
        if isinstance(column, LoadedColumn):
            _copy(array, column, found)
        elif found:
            self._fill_from_pack(ref, array, column, found)
        array.flags.writeable = False
        return array

    def _fill_from_pack(self, ref: GroupRef, array: Array, column: StoredColumn, runs: Sequence[Run]) -> None:
        path = self._root / ref.path

        def read(_: ReadingStore) -> None:
            with PackFile(path) as pack:
                _fill(array, pack, column, runs)

        self._live.call(f"read {path}", read, hopeless=lambda: self._is_gone(ref))

    def _is_gone(self, ref: PoolRef) -> bool:
        """Whether the mount answers and the pack is not there: no repeat brings it back."""
        try:
            return (self._root / "vime" / "pool.json").exists() and not (self._root / ref.path).exists()
        except OSError:
            return False


def _copy(array: Array, column: LoadedColumn, runs: Sequence[Run]) -> None:
    """The wanted bytes of all runs, one after the other."""
    target = array.reshape(-1).view(np.uint8).data
    start = 0
    for run in runs:
        first = run.offset + run.skip
        target[start : start + run.take] = column.content[first : first + run.take]
        start += run.take


def _fill(array: Array, pack: PackFile, column: StoredColumn, runs: Sequence[Run]) -> None:
    """The wanted bytes of all runs, one after the other."""
    target = array.reshape(-1).view(np.uint8).data
    edges = [run.num_bytes for run in runs if run.take != run.num_bytes]
    scratch = memoryview(bytearray(max(edges, default=0)))
    start = 0
    for run in runs:
        part = target[start : start + run.take]
        start += run.take
        if run.take == run.num_bytes:
            pack.read(run, part, start=column.offset, digests=column.digests)
            continue
        content = scratch[: run.num_bytes]
        pack.read(run, content, start=column.offset, digests=column.digests)
        part[:] = content[run.skip : run.skip + run.take]


def _checked_part(
    what: str, column: Column, member: int, layers: range | None, start: int, stop: int | None
) -> tuple[range, range]:
    """The layers and rows to read; `layers` is None where rows come first."""
    layout = column.layout
    if (layers is None) != (column.spec.layout == "row_major"):
        raise StorageError(f"{what} is {column.spec.layout}.", next_step="Use read_rows or read_layers, as it is.")
    if not 0 <= member < layout.num_members:
        raise StorageError(f"{what} has {layout.num_members} members, member {member} was asked for.")
    layers = range(1) if layers is None else layers
    if layers.step != 1 or not 0 <= layers.start <= layers.stop <= layout.num_layers:
        raise StorageError(f"{what} has {layout.num_layers} layers, {layers} was asked for.")
    num_rows = layout.num_rows(member)
    rows = range(start, num_rows if stop is None else stop)
    if not 0 <= rows.start <= rows.stop <= num_rows:
        raise StorageError(f"{what} has {num_rows} rows of member {member}, {rows} was asked for.")
    return layers, rows
