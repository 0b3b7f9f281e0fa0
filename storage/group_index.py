"""Where the columns of a published group are in its pack file, and the digests of their chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import straw

from storage.chunk_layout import ChunkLayout
from storage.chunks import ColumnDigests, read_chunk_table
from storage.columns import DTYPES, ColumnSpec
from storage.refs import PoolRef, to_straw_ref
from vime.errors import CorruptDataError, StorageError


class RecordSource(Protocol):
    """What is needed of straw to find a record."""

    def manifest(self, ref: straw.RecordSetRef) -> dict[str, Any]: ...
    def read_record(self, ref: straw.RecordRef) -> straw.Record: ...
    def inspect_segment(self, ref: straw.SegmentRef) -> dict[str, Any]: ...


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


class _HeaderTable(msgspec.Struct, frozen=True):
    columns: list[ColumnSpec]


def column_specs(header: bytes) -> list[ColumnSpec]:
    """The table of columns of a group's header, without the rest of it. Raises `CorruptDataError`."""
    try:
        return msgspec.msgpack.decode(header, type=_HeaderTable).columns
    except msgspec.MsgspecError as error:
        raise CorruptDataError(f"A group header of {len(header)} bytes can't be read: {error}.") from error


def member_records(source: RecordSource, ref: PoolRef) -> list[straw.RecordRef]:
    """The records of a publication, in order."""
    return [straw.RecordRef.from_dict(member) for member in source.manifest(to_straw_ref(ref))["records"]]


def read_group_index(source: RecordSource, ref: PoolRef) -> GroupIndex:
    """Index of the group at `ref`, whose records are the header, the columns and the chunk digests.

    Raises `CorruptDataError` when they don't fit together, `SchemaVersionError`, and straw's errors.
    """
    members = member_records(source, ref)
    header, digests = (bytes(source.read_record(members[number]).payload) for number in (0, -1))
    specs, table = column_specs(header), read_chunk_table(digests)
    if len(members) != len(specs) + 2 or [spec.name for spec in specs] != list(table.columns):
        raise CorruptDataError(
            f"{ref.path}: a group with the columns {[spec.name for spec in specs]} has {len(members)} records and "
            f"digests of {list(table.columns)}."
        )
    entries = source.inspect_segment(members[0].segment)["records"]
    columns = {}
    for spec, member in zip(specs, members[1:-1], strict=True):
        found = table.columns[spec.name]
        layout = ChunkLayout.of(_checked(spec, ref), found.rows_per_chunk)
        num_bytes = entries[member.ordinal]["envelope"]["length"]
        found.check(f"{ref.path}: column {spec.name!r}", layout, num_bytes)
        columns[spec.name] = StoredColumn(spec, layout, _payload_start(member, entries), found)
    return GroupIndex(ref.path, columns, len(header) + len(digests))


def _payload_start(member: straw.RecordRef, entries: Sequence[dict[str, Any]]) -> int:
    """Byte of the file where a record's payload begins: it ends where the next record begins."""
    end: int = entries[member.ordinal + 1]["offset"]
    length: int = entries[member.ordinal]["envelope"]["length"]
    return int(member.segment.offset) + end - length


def _checked(spec: ColumnSpec, ref: PoolRef) -> ColumnSpec:
    if spec.dtype not in DTYPES:
        raise CorruptDataError(f"{ref.path}: column {spec.name!r} has dtype {spec.dtype!r}, allowed: {list(DTYPES)}.")
    if len(spec.shape) <= spec.row_axis or spec.row_offsets[-1:] != [spec.shape[spec.row_axis]]:
        raise CorruptDataError(
            f"{ref.path}: column {spec.name!r} of shape {spec.shape} has row offsets {spec.row_offsets}."
        )
    return spec
