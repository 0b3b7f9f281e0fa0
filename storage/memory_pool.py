"""A pool in memory: payloads without a disk, kept until they are released."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from storage.byte_cache import ByteCache
from storage.columns import Array, EncodedGroup, GroupHeader, Layout, read_header
from storage.memory_columns import KeptColumn, checked_rows
from storage.memory_parts import PartStore
from storage.refs import GroupRef, PoolRef, lease_from_bytes
from vime.errors import StorageError

CACHE_BYTES = 256 << 20
"""Columns and members' parts of them that a reader keeps: those of the groups of a few microbatches."""
_SCHEME = "memory:"
"""Begins the `path` of a reference into a pool in memory; the key follows."""


class MemoryPool:
    """Payloads of one run in a `PartStore`. Thread-safe if the store is.

    A publication has one key and one lifetime: its header and all columns are released together.
    """

    def __init__(self, run_id: str, store: PartStore, *, cache_bytes: int = CACHE_BYTES) -> None:
        self.run_id = run_id
        self._store = store
        self._closed = False
        self._cache = ByteCache(cache_bytes)

    def publish_groups(self, items: Sequence[tuple[EncodedGroup, bytes]], *, submission_id: str) -> list[GroupRef]:
        """Keep (group, lease) pairs; references in the same order.

        The same `submission_id` with the same content returns the same references.
        """
        entries = {}
        refs = []
        for number, (group, lease_bytes) in enumerate(items):
            parts = [group.header]
            for spec in read_header(group.header).columns:
                column = KeptColumn(spec, len(parts))
                parts += map(_little_endian_bytes, column.cut(group.columns[spec.name]))
            attempt = lease_from_bytes(lease_bytes).attempt_id
            ref = self._ref(f"{submission_id}.{number}", parts, owner=attempt)
            entries[key_of(ref)] = parts
            refs.append(ref)
        self._put(entries)
        return refs

    def publish_prompts(self, payloads: Sequence[bytes], *, submission_id: str) -> list[PoolRef]:
        """Keep prompt payloads."""
        refs = [self._ref(f"{submission_id}.{number}", [data]) for number, data in enumerate(payloads)]
        self._put({key_of(ref): [data] for ref, data in zip(refs, payloads, strict=True)})
        return refs

    def publish_blob(self, data: bytes, *, submission_id: str) -> PoolRef:
        """Keep one byte string."""
        return self.publish_prompts([data], submission_id=submission_id)[0]

    def read_header(self, ref: GroupRef) -> bytes:
        """Header bytes of a group. Raises `StorageError` when it was released."""
        return self._read(ref, [0])[0]

    def read_blob(self, ref: PoolRef) -> bytes:
        """The bytes of a blob or prompt. Raises `StorageError` when it was released."""
        return self._read(ref, [0])[0]

    def read_columns(self, ref: GroupRef, names: Sequence[str]) -> dict[str, Array]:
        """Columns of a group by name; only these are read. Raises `StorageError` for a name that it lacks."""
        columns = [self._column(ref, name) for name in names]
        payloads = iter(self._read(ref, [number for column in columns for number in column.numbers]))
        return {column.spec.name: column.joined([next(payloads) for _ in column.numbers], ref) for column in columns}

    def read_rows(self, ref: GroupRef, column: str, member: int, start: int = 0, stop: int | None = None) -> Array:
        """Rows `start:stop` of a member in a column whose rows come first: [stop - start, ...], read-only.

        The part that holds them is fetched, a member's or a small column, and kept for the next calls in a cache that
        is bounded in bytes.
        """
        array, rows = self._cached_part(ref, column, "row_major", member, start, stop)
        return array[rows.start : rows.stop]

    def num_rows(self, ref: GroupRef, column: str, member: int) -> int:
        """Rows of a member in a column; 0 in a column that the group lacks, and where absent members have no rows."""
        offsets = [spec.row_offsets for spec in self._header(ref).columns if spec.name == column]
        return sum(found[member + 1] - found[member] for found in offsets)

    def read_layers(
        self, ref: GroupRef, column: str, member: int, layers: range, start: int = 0, stop: int | None = None
    ) -> Array:
        """Rows `start:stop` of a member in some layers of a column whose layers come first: [L, stop - start, ...]."""
        array, rows = self._cached_part(ref, column, "layer_major", member, start, stop)
        if layers.step != 1 or not 0 <= layers.start <= layers.stop <= len(array):
            raise StorageError(f"{ref.path}: column {column!r} has {len(array)} layers, {layers} was asked for.")
        return array[layers.start : layers.stop, rows.start : rows.stop]

    def read_group(self, ref: GroupRef) -> EncodedGroup:
        """The whole group: header and all columns."""
        header = self.read_header(ref)
        return EncodedGroup(header, self.read_columns(ref, [spec.name for spec in read_header(header).columns]))

    def release(self, refs: Iterable[PoolRef]) -> None:
        """Forget publications; reading one afterwards is refused."""
        self._store.release([key_of(ref) for ref in refs])

    def close(self) -> None:
        """Use it no more; the store keeps what was published."""
        self._closed = True

    def __enter__(self) -> MemoryPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, entries: dict[str, list[bytes]]) -> None:
        self._check_open()
        if entries:
            self._store.put(entries)

    def _read(self, ref: PoolRef, numbers: Sequence[int]) -> list[bytes]:
        self._check_open()
        return self._store.get(key_of(ref), numbers)

    def _column(self, ref: GroupRef, name: str) -> KeptColumn:
        """Raises `StorageError` for a name that the group lacks."""
        first = 1
        specs = self._header(ref).columns
        for spec in specs:
            column = KeptColumn(spec, first)
            if spec.name == name:
                return column
            first = column.numbers.stop
        raise StorageError(
            f"The group in {ref.path} has no columns [{name!r}], it has {sorted(spec.name for spec in specs)}."
        )

    def _header(self, ref: GroupRef) -> GroupHeader:
        header: GroupHeader | None = self._cache.get(ref.path)
        if header is None:
            content = self.read_header(ref)
            header = read_header(content)
            self._cache.put(ref.path, header, len(content))
        return header

    def _cached_part(
        self, ref: GroupRef, name: str, layout: Layout, member: int, start: int, stop: int | None
    ) -> tuple[Array, range]:
        """The part that holds rows `start:stop` of a member, shaped as stored, and where they are in it."""
        column = self._column(ref, name)
        rows = checked_rows(column.spec, ref, layout, member, start, stop)
        part = member if column.is_split else 0
        array: Array | None = self._cache.get((ref.path, name, part))
        if array is None:
            (data,) = self._read(ref, [column.numbers[part]])
            array = column.array(part, data, ref)
            self._cache.put((ref.path, name, part), array, array.nbytes)
        first = column.spec.row_offsets[member] if column.is_split else 0
        return array, range(rows.start - first, rows.stop - first)

    def _ref(self, name: str, parts: Sequence[bytes], owner: str = "") -> PoolRef:
        digest = xxhash.xxh3_128()
        for part in parts:
            digest.update(part)
        content = digest.hexdigest()
        return PoolRef(
            run_id=self.run_id,
            path=f"{_SCHEME}{name}:{content}",
            segment_id=owner,
            segment_size=0,
            segment_checksum="",
            segment_version=0,
            checksum_algorithm="xxh3_128",
            offset=0,
            ordinal=0,
            digest=content,
            num_records=len(parts),
            num_bytes=sum(map(len, parts)),
        )

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"The pool in memory of run {self.run_id!r} is closed.", next_step="Open another.")


def key_of(ref: PoolRef) -> str:
    """Key of a reference into a pool in memory. Raises `StorageError` for one into a pool on disk."""
    if not ref.path.startswith(_SCHEME):
        raise StorageError(
            f"{ref.path} lies in a pool on disk, not in memory.",
            next_step="Start the run with the --rollout-data-transport that it began with.",
        )
    return ref.path.removeprefix(_SCHEME)


def attempt_of(ref: GroupRef) -> str:
    """The attempt that a group in memory was published for."""
    return ref.segment_id


def _little_endian_bytes(array: Array) -> bytes:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
