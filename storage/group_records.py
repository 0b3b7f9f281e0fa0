"""The records that a group is stored as: its head, then its columns, small ones together.

What a publication costs grows with its records, so columns share one while that takes no large copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from storage.chunks import chunk_table, column_bytes
from storage.columns import EncodedGroup
from storage.group_index import GroupHead, column_specs

JOINED_BYTES = 1 << 20
"""Most bytes of columns that share a record."""

Payload = bytes | memoryview


def group_payloads(group: EncodedGroup) -> list[Payload]:
    """The payloads of a group's records, in order."""
    contents = {name: column_bytes(array) for name, array in group.columns.items()}
    joined = list(_joined(list(contents.values())))
    table = chunk_table(column_specs(group.header), contents, [len(parts) for parts in joined])
    head = msgspec.msgpack.encode(GroupHead(group.header, table))
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
