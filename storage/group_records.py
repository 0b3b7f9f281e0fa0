"""The records that the groups of one transaction are stored as: for each its head, then its columns.

What a publication costs grows with its records. So columns of a group share one while that takes no large copy, and
small groups that become durable together share records for their columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from storage.chunks import SharedPlace, chunk_table, column_bytes
from storage.columns import EncodedGroup
from storage.group_index import GroupHead, column_specs

JOINED_BYTES = 1 << 20
"""Most bytes of columns that share a record of one group, and of a group that shares records with others."""
SHARED_BYTES = 8 << 20
"""Most bytes of a record that groups share."""

Payload = bytes | memoryview


@dataclass(frozen=True)
class TransactionPayloads:
    """The payloads of one transaction's records, in order."""

    shared: list[bytes]
    """Columns of several groups; these records come first."""
    groups: list[list[Payload]]
    """For each group its head and the columns that it doesn't share."""


def transaction_payloads(groups: Sequence[EncodedGroup]) -> TransactionPayloads:
    """The payloads of groups that become durable together."""
    contents = [{name: column_bytes(array) for name, array in group.columns.items()} for group in groups]
    sizes = [sum(map(len, columns.values())) for columns in contents]
    share = sum(size <= JOINED_BYTES for size in sizes) > 1
    shared = _SharedRecords()
    payloads: list[list[Payload]] = []
    for group, columns, size in zip(groups, contents, sizes, strict=True):
        if share and size <= JOINED_BYTES:
            place = shared.add(list(columns.values()), size)
            payloads.append([_head(group, columns, [len(columns)], place)])
        else:
            payloads.append(_own_payloads(group, columns))
    return TransactionPayloads([b"".join(parts) for parts in shared.records], payloads)


@dataclass
class _SharedRecords:
    """The parts of each record that groups share."""

    records: list[list[memoryview]] = field(default_factory=list)
    num_bytes: int = 0
    """Of the last record."""

    def add(self, parts: Sequence[memoryview], num_bytes: int) -> SharedPlace:
        """Append one group's columns of `num_bytes` together."""
        if not self.records or self.num_bytes + num_bytes > SHARED_BYTES:
            self.records.append([])
            self.num_bytes = 0
        self.records[-1] += parts
        self.num_bytes += num_bytes
        return SharedPlace(len(self.records) - 1, self.num_bytes - num_bytes, num_bytes)


def _own_payloads(group: EncodedGroup, contents: Mapping[str, memoryview]) -> list[Payload]:
    joined = list(_joined(list(contents.values())))
    head = _head(group, contents, [len(parts) for parts in joined])
    return [head, *(parts[0] if len(parts) == 1 else b"".join(parts) for parts in joined)]


def _head(
    group: EncodedGroup, contents: Mapping[str, memoryview], records: list[int], shared: SharedPlace | None = None
) -> bytes:
    table = chunk_table(column_specs(group.header), contents, records, shared)
    return msgspec.msgpack.encode(GroupHead(group.header, table))


def _joined(contents: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Neighbours that share a record."""
    parts: list[memoryview] = []
    num_bytes = 0
    for content in contents:
        if parts and num_bytes + len(content) > JOINED_BYTES:
            yield parts
            parts, num_bytes = [], 0
        parts.append(content)
        num_bytes += len(content)
    if parts:
        yield parts
