"""The stored form of a group: one msgpack header and a few column arrays over all members.

All columns of a group are one publication: they become durable together, and are kept and released together. Arrays
are little-endian. Loading never runs code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from storage.candidate_columns import candidate_columns
from storage.column_rows import DTYPES as DTYPES
from storage.column_rows import Array as Array
from storage.column_rows import ColumnRows, optional_column, place
from storage.packed_fields import MEDIA, first_with_same_media, packed_columns, unpack_member
from storage.routes import route_dtype, rows_first, stack_layers_first
from storage.summary import GroupSummary, summarize
from storage.token_columns import token_columns
from vime.errors import CorruptDataError, SchemaVersionError
from vime.utils.routed_experts import join_routes
from vime.utils.types import Sample

SCHEMA_VERSION = 2
ROUTES = "routes"
_LISTS = {
    "tokens": "tokens",
    "loss_mask": "loss_mask",
    "sampler_log_probs": "rollout_log_probs",
    "teacher_log_probs": "teacher_log_probs",
}
_ARRAYS = {
    "top_k_ids": "rollout_topk_token_ids",
    "top_k_log_probs": "rollout_topk_log_probs",
    "top_p_ids": "rollout_top_p_token_ids",
    "top_p_offsets": "rollout_top_p_token_offsets",
    "top_p_log_probs": "rollout_top_p_log_probs",
    ROUTES: "rollout_routed_experts",
}
COLUMN_FIELDS = {**_LISTS, **_ARRAYS}
"""Column -> field of `Sample` with the same numbers. The packed columns hold the other fields."""

Layout = Literal["row_major", "layer_major"]
"""Order of a column's axes: [rows, ...], or [L, rows, ...] with MoE layers first."""


class ColumnSpec(msgspec.Struct, frozen=True):
    """One column: its array is the concatenation of the members' rows."""

    name: str
    dtype: str
    shape: list[int]
    """Of the stored array, in the order that `layout` says."""
    row_offsets: list[int]
    """[members + 1]; rows of member m are row_offsets[m]:row_offsets[m + 1]."""
    absent: list[int] = msgspec.field(default_factory=list)
    """Members whose field is None; they have no rows, or rows with the neutral value (mask 1, log-probability 0)."""
    layout: Layout = "row_major"
    """layer_major makes a range of rows of one layer one contiguous range of bytes."""

    @property
    def row_axis(self) -> int:
        """Axis of the stored array that counts rows."""
        return 1 if self.layout == "layer_major" else 0


class GroupHeader(msgspec.Struct, frozen=True):
    """What the header bytes say."""

    schema_version: int
    summary: GroupSummary
    columns: list[ColumnSpec]


class _Versioned(msgspec.Struct):
    schema_version: int


@dataclass(frozen=True)
class EncodedGroup:
    """A group ready to be published: `header` bytes and `columns` by name, in the order of the header's table."""

    header: bytes
    columns: dict[str, Array]


def encode_group(
    samples: Sequence[Sample],
    *,
    reward_key: str | None = None,
    sc_dtype: str = "float32",
    num_experts: int | None = None,
) -> EncodedGroup:
    """Header and columns of one group; which columns there are is said where they are made.

    `sc_dtype` is float32 or float16, for log-probabilities of the sampler's candidates. `num_experts` chooses the
    type of routes; without it the greatest id does.

    Raises `SampleError` naming the sample and the path of a value that can't be stored, or a field whose length or
    numbers break the contract of `Sample`.
    """
    summary = summarize(samples, reward_key=reward_key)
    specs: list[ColumnSpec] = []
    columns: dict[str, Array] = {}
    for column in [
        *token_columns(samples),
        *candidate_columns(samples, sc_dtype),
        *packed_columns(samples, frozenset(COLUMN_FIELDS.values())),
    ]:
        columns[column.name] = np.concatenate(column.rows).astype(DTYPES[column.dtype], copy=False)
        specs.append(_spec(column, columns[column.name], "row_major"))
    for column in _routes(samples, num_experts):
        columns[ROUTES] = stack_layers_first(column.rows, DTYPES[column.dtype])
        specs.append(_spec(column, columns[ROUTES], "layer_major"))
    return EncodedGroup(msgspec.msgpack.encode(GroupHeader(SCHEMA_VERSION, summary, specs)), columns)


def read_header(data: bytes) -> GroupHeader:
    """Parsed header. Raises `SchemaVersionError` for a newer layout and `CorruptDataError` for anything unreadable."""
    try:
        version = msgspec.msgpack.decode(data, type=_Versioned).schema_version
        if version > SCHEMA_VERSION:
            raise SchemaVersionError(
                f"A group header has schema version {version}, this code reads up to {SCHEMA_VERSION}.",
                next_step="Update vime to the version that wrote the pool.",
            )
        return msgspec.msgpack.decode(data, type=GroupHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptDataError(f"A group header of {len(data)} bytes can't be read: {error}.") from error


def summary_from_header(data: bytes) -> GroupSummary:
    """The summary that was stored with the group. Raises as `read_header`."""
    return read_header(data).summary


def decode_group(
    header: bytes, columns: Mapping[str, Array], *, leave_out: Collection[str] = frozenset()
) -> list[Sample]:
    """The samples that were encoded, with these differences: log-probabilities come back rounded to what they were
    stored as, arrays with the documented dtypes, routes as one array of the type they were stored as; the fields of
    columns in `leave_out` are as if they had never been set.

    Raises `SchemaVersionError` or `CorruptDataError`.
    """
    stored = read_header(header)
    parsed = msgspec.structs.replace(stored, columns=[spec for spec in stored.columns if spec.name not in leave_out])
    for spec in parsed.columns:
        _check_column(parsed, spec, columns)
    return [_decode_member(parsed, columns, member) for member in range(len(parsed.summary.sample_indices))]


def member_rows(spec: ColumnSpec, column: Array, member: int) -> Array:
    """A view of a member's rows of a column, rows first whatever the layout."""
    start, stop = spec.row_offsets[member : member + 2]
    return rows_first(column, start, stop) if spec.layout == "layer_major" else column[start:stop]


def _spec(column: ColumnRows, array: Array, layout: Layout) -> ColumnSpec:
    return ColumnSpec(column.name, column.dtype, list(array.shape), column.row_offsets(), column.absent, layout)


def _routes(samples: Sequence[Sample], num_experts: int | None) -> list[ColumnRows]:
    rows = [
        None if sample.rollout_routed_experts is None else join_routes(sample.rollout_routed_experts, place(sample))
        for sample in samples
    ]
    dtype = route_dtype([array for array in rows if array is not None], num_experts)
    return optional_column(ROUTES, dtype, samples, rows)


def _check_column(header: GroupHeader, spec: ColumnSpec, columns: Mapping[str, Array]) -> None:
    group = f"group {header.summary.group_index}"
    if spec.name not in columns:
        raise CorruptDataError(f"The columns of {group} have no {spec.name!r}, found {list(columns)}.")
    found = list(columns[spec.name].shape)
    num_rows = found[spec.row_axis] if spec.row_axis < len(found) else 0
    members = len(header.summary.sample_indices)
    if len(spec.row_offsets) != members + 1 or spec.row_offsets[-1] != num_rows:
        raise CorruptDataError(
            f"Column {spec.name!r} of {group} has {num_rows} rows, its row offsets are {spec.row_offsets} for "
            f"{members} samples."
        )


def _own_or_shared_rows(spec: ColumnSpec, column: Array, member: int) -> Array:
    """A member's rows, which are another's where media are shared. Raises `CorruptDataError`."""
    rows = member_rows(spec, column, member)
    if spec.name not in MEDIA:
        return rows
    first = first_with_same_media(rows)
    if first is None:
        return rows
    if not 0 <= first < member:
        raise CorruptDataError(
            f"Column {spec.name!r}: member {member} is said to have what member {first} has; allowed: a member before."
        )
    return member_rows(spec, column, first)


def _decode_member(header: GroupHeader, columns: Mapping[str, Array], member: int) -> Sample:
    rows = {
        spec.name: _own_or_shared_rows(spec, columns[spec.name], member)
        for spec in header.columns
        if member not in spec.absent
    }
    sample = unpack_member(rows)
    for name, field in _LISTS.items():
        if name in rows and not (name == "loss_mask" and sample.remove_sample):
            setattr(sample, field, rows[name].tolist())
    for name, field in _ARRAYS.items():
        if name in rows:
            array = rows[name]
            setattr(sample, field, array.astype(np.float32) if array.dtype == np.float16 else array.copy())
    return sample
