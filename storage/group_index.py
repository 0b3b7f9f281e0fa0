"""Where the columns of a published group are in its pack file, and the digests of their chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
import straw

from storage.chunk_layout import ChunkLayout
from storage.chunks import ChunkTable, ColumnDigests, read_chunk_table
from storage.columns import DTYPES, ColumnSpec
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
class GroupIndex:
    """The columns of one group by name."""

    path: str
    """Pack file, relative to the pool's root."""
    columns: dict[str, StoredColumn]
    num_bytes: int
    """What it counts in a cache."""

    def column(self, name: str) -> StoredColumn:
        """Raises `StorageError` for a name that the group lacks."""
        if name not in self.columns:
            raise StorageError(f"The group in {self.path} has no columns ['{name}'], it has {sorted(self.columns)}.")
        return self.columns[name]


class GroupHead(msgspec.Struct, frozen=True, array_like=True):
    """The first record of a group."""

    header: bytes
    table: bytes
    """Of the chunk digests."""


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


def read_head(data: bytes) -> GroupHead:
    """The first record of a group. Raises `CorruptDataError`."""
    try:
        return msgspec.msgpack.decode(data, type=GroupHead)
    except msgspec.MsgspecError as error:
        raise CorruptDataError(f"The head of a group, {len(data)} bytes, can't be read: {error}.") from error


def read_group_index(source: RecordSource, ref: PoolRef) -> GroupIndex:
    """Index of the group at `ref`, whose records are the head and the columns.

    Raises `CorruptDataError` when they don't fit together, `SchemaVersionError`, and straw's errors.
    """
    members = source.members(to_straw_ref(ref))
    head = read_head(bytes(source.read_record(members[0]).payload))
    specs, table = column_specs(head.header), read_chunk_table(head.table)
    counts = table.records
    if len(members) != 1 + len(counts) or sum(counts) != len(specs) or [s.name for s in specs] != list(table.columns):
        raise CorruptDataError(
            f"{ref.path}: a group with the columns {[spec.name for spec in specs]} has {len(members)} records, for "
            f"{counts} columns after the first, and digests of {list(table.columns)}."
        )
    extents = source.extents(members[0].segment)
    columns: dict[str, StoredColumn] = {}
    waiting = iter(specs)
    for count, member in zip(counts, members[1:], strict=True):
        its_specs = [_checked(next(waiting), ref) for _ in range(count)]
        columns |= {column.spec.name: column for column in _in_record(its_specs, table, extents[member.ordinal], ref)}
    return GroupIndex(ref.path, columns, len(head.header) + len(head.table))


def _in_record(specs: Sequence[ColumnSpec], table: ChunkTable, extent: Extent, ref: PoolRef) -> Iterator[StoredColumn]:
    """The columns that share a record, one after the other. Raises `CorruptDataError`."""
    offset = extent.start
    for spec in specs:
        digests = table.columns[spec.name]
        layout = ChunkLayout.of(spec, digests.rows_per_chunk)
        digests.check(f"{ref.path}: column {spec.name!r}", layout)
        yield StoredColumn(spec, layout, offset, digests)
        offset += layout.num_bytes
    if offset != extent.start + extent.num_bytes:
        raise CorruptDataError(
            f"{ref.path}: the columns {[spec.name for spec in specs]} have {extent.num_bytes} bytes together, expected "
            f"{offset - extent.start}."
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
