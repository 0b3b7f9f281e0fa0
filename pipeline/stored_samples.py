"""The samples of accepted groups, for functions of the user's own on a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from storage.columns import ROUTES, Array, decode_group, read_header
from storage.refs import GroupRef
from vime.utils.types import Sample

_LARGE = frozenset({"top_k_ids", "top_k_log_probs", "top_p_ids", "top_p_offsets", "top_p_log_probs", ROUTES})


class GroupReader(Protocol):
    """What is needed of a pool."""

    def read_header(self, ref: GroupRef) -> bytes: ...
    def read_columns(self, ref: GroupRef, names: Sequence[str]) -> dict[str, Array]: ...


def stored_samples(ref: GroupRef, pool: GroupReader) -> list[Sample]:
    """The samples of a group, without candidates and routes. Raises `StorageError`."""
    header = pool.read_header(ref)
    names = [column.name for column in read_header(header).columns if column.name not in _LARGE]
    return decode_group(header, pool.read_columns(ref, names), leave_out=_LARGE)
