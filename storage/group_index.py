"""Where the columns of a published group are in its pack file, and the digests of their chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

import msgspec
import straw

from storage.chunk_layout import ChunkLayout
from storage.chunks import ChunkTable, ColumnDigests, read_chunk_table
from storage.columns import DTYPES, ColumnSpec
from storage.group_head import read_head
from storage.refs import PoolRef, to_straw_ref
from vime.errors import CorruptDataError, StorageError


class Extent(NamedTuple):
    """The bytes of one record's payload."""

    start: int
    """In the pack file."""
    num_bytes: int


class RecordSource(Protocol):
    """What is needed of straw to find a record."""

    def read_record(self, ref: straw.RecordRef) -> straw.Record: ...

    def members(self, ref: straw.RecordSetRef) -> tuple[straw.RecordRef, ...]:
        """The records of a publication, in order."""

    def extents(self, ref: straw.SegmentRef) -> tuple[Extent, ...]:
        """Where the payloads of one transaction's records are, by ordinal."""


@dataclass(frozen=True)
class StoredColumn:
    """One column in the pack file: its bytes start at `offset`."""

    spec: ColumnSpec
    layout: ChunkLayout
    offset: int
    digests: ColumnDigests


@dataclass(frozen=True)
class LoadedColumn:
    """One column of a small group, whose record was read, and checked, as a whole."""

    spec: ColumnSpec
    layout: ChunkLayout
    content: memoryview
    """The column's bytes."""


Column = StoredColumn | LoadedColumn


@dataclass(frozen=True)
class GroupIndex:
    """The columns of one group by name."""

    path: str
    """Pack file, relative to the pool's root."""
    header: bytes
    columns: Mapping[str, Column]
    num_bytes: int
    """What it counts in a cache."""

    def column(self, name: str) -> Column:
        """Raises `StorageError` for a name that the group lacks."""
        if name not in self.columns:
            raise StorageError(f"The group in {self.path} has no columns ['{name}'], it has {sorted(self.columns)}.")
        return self.columns[name]


class _HeaderTable(msgspec.Struct, frozen=True):
    columns: list[ColumnSpec]


def column_specs(header: bytes) -> list[ColumnSpec]:
    """The table of columns of a group's header, without the rest of it. Raises `CorruptDataError`."""
    try:
        return msgspec.msgpack.decode(header, type=_HeaderTable).columns
    except msgspec.MsgspecError as error:
        raise CorruptDataError(f"A group header of {len(header)} bytes can't be read: {error}.") from error


def read_payload(source: RecordSource, ref: PoolRef) -> bytes:
    """The payload of the record that `ref` names. Raises straw's errors."""
    return bytes(source.read_record(source.members(to_straw_ref(ref))[ref.record]).payload)


def read_group_index(source: RecordSource, ref: PoolRef) -> GroupIndex:
    """Index of the group at `ref`: the columns are in its first record, with the head, or in those after it.

    Raises `CorruptDataError` when they don't fit together, `SchemaVersionError`, and straw's errors.
    """
    members = source.members(to_straw_ref(ref))
    head = read_head(bytes(source.read_record(members[0]).payload))
    specs, table = column_specs(head.header), read_chunk_table(head.table)
    names = [spec.name for spec in specs]
    in_table = (len(specs), names) if table.records else (0, [])
    if len(members) != 1 + len(table.records) or (sum(table.records), list(table.columns)) != in_table:
        raise CorruptDataError(
            f"{ref.path}: a group with the columns {names} has {len(members)} records, for {table.records} columns "
            f"after the first, and digests of {list(table.columns)}."
        )
    if table.records:
        extents = source.extents(members[0].segment)
        columns: Iterator[Column] = _after_head(specs, table, [extents[member.ordinal] for member in members[1:]], ref)
    else:
        columns = _in_head(specs, head.columns, ref)
    num_bytes = len(head.header) + len(head.table) + len(head.columns)
    return GroupIndex(ref.path, head.header, {column.spec.name: column for column in columns}, num_bytes)


def _after_head(
    specs: Sequence[ColumnSpec], table: ChunkTable, extents: Sequence[Extent], ref: PoolRef
) -> Iterator[StoredColumn]:
    """The columns in the records `extents`. Raises `CorruptDataError`."""
    waiting = iter(specs)
    for count, extent in zip(table.records, extents, strict=True):
        yield from _in_record(list(islice(waiting, count)), table, extent, ref)


def _in_record(specs: Sequence[ColumnSpec], table: ChunkTable, extent: Extent, ref: PoolRef) -> Iterator[StoredColumn]:
    """The columns that share a record, one after the other. Raises `CorruptDataError`."""
    offset = extent.start
    for spec in specs:
        digests = table.columns[spec.name]
        layout = ChunkLayout.of(_checked(spec, ref), digests.rows_per_chunk)
        digests.check(f"{ref.path}: column {spec.name!r}", layout)
        yield StoredColumn(spec, layout, offset, digests)
        offset += layout.num_bytes
    _check_size(specs, offset - extent.start, extent.num_bytes, ref)


def _in_head(specs: Sequence[ColumnSpec], content: memoryview, ref: PoolRef) -> Iterator[LoadedColumn]:
    """The columns of a small group. Raises `CorruptDataError`."""
    offset = 0
    for spec in specs:
        layout = ChunkLayout.of(_checked(spec, ref))
        yield LoadedColumn(spec, layout, content[offset : offset + layout.num_bytes])
        offset += layout.num_bytes
    _check_size(specs, offset, len(content), ref)


def _check_size(specs: Sequence[ColumnSpec], expected: int, found: int, ref: PoolRef) -> None:
    if found != expected:
        raise CorruptDataError(
            f"{ref.path}: the columns {[spec.name for spec in specs]} have {found} bytes together, expected {expected}."
        )


def record_extents(ref: straw.SegmentRef, records: Sequence[dict[str, Any]]) -> tuple[Extent, ...]:
    """Extents from straw's index of a transaction: all but the last record, which is a manifest.

    A payload ends where the next record begins.
    """
    lengths = [record["envelope"]["length"] for record in records]
    starts = [
        ref.offset + following["offset"] - length for length, following in zip(lengths, records[1:], strict=False)
    ]
    return tuple(map(Extent, starts, lengths))


def _checked(spec: ColumnSpec, ref: PoolRef) -> ColumnSpec:
    if spec.dtype not in DTYPES:
        raise CorruptDataError(f"{ref.path}: column {spec.name!r} has dtype {spec.dtype!r}, allowed: {list(DTYPES)}.")
    if len(spec.shape) <= spec.row_axis or spec.row_offsets[-1:] != [spec.shape[spec.row_axis]]:
        raise CorruptDataError(
            f"{ref.path}: column {spec.name!r} of shape {spec.shape} has row offsets {spec.row_offsets}."
        )
    return spec
