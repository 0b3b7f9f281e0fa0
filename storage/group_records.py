"""The records that a group is stored as: a small group as one, others as their head and then their columns.

What a publication costs grows with its records, so columns share one while that takes no large copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from storage.chunks import chunk_table, column_bytes, no_chunk_table
from storage.columns import EncodedGroup
from storage.group_head import head_alone, head_with_columns
from storage.group_index import column_specs

ONE_RECORD_BYTES = 128 << 10
"""Most bytes of columns that share the record of the head: who reads any part of it reads and checks all."""
JOINED_BYTES = 1 << 20
"""Most bytes of columns that share a record."""

Payload = bytes | memoryview


def group_payloads(group: EncodedGroup) -> list[Payload]:
    """The payloads of a group's records, in order."""
    specs = column_specs(group.header)
    contents = {spec.name: column_bytes(group.columns[spec.name]) for spec in specs}
    if sum(map(len, contents.values())) <= ONE_RECORD_BYTES:
        return [head_with_columns(group.header, no_chunk_table(), list(contents.values()))]
    joined = list(_joined(list(contents.values())))
    table = chunk_table(specs, contents, [len(parts) for parts in joined])
    head = head_alone(group.header, table)
    return [head, *(parts[0] if len(parts) == 1 else b"".join(parts) for parts in joined)]


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
