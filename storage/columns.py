"""The stored form of a group: one msgpack header and a few column arrays over all members.

Arrays that grow with tokens are columns, concatenated over members, little-endian; everything else of a sample is in
the header. Loading never runs code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from storage.summary import GroupSummary, summarize
from storage.values import pack, unpack_extension
from vime.errors import CorruptDataError, SampleError, SchemaVersionError
from vime.utils.types import Sample

SCHEMA_VERSION = 1
DTYPES = {"uint8": "|u1", "uint16": "<u2", "int32": "<i4", "int64": "<i8", "float16": "<f2", "float32": "<f4"}
"""Column dtypes by name, with the byte order on disk."""
_COLUMN_FIELDS = {"tokens": "tokens", "loss_mask": "loss_mask", "rollout_log_probs": "sampler_log_probs"}
"""Sample field -> column."""
_FIELDS = frozenset(field.name for field in dataclasses.fields(Sample)) - _COLUMN_FIELDS.keys()

Array = npt.NDArray[Any]
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
    """Members whose field is None; their rows hold the neutral value (mask 1, log-probability 0)."""
    layout: Layout = "row_major"
    """layer_major makes a range of rows of one layer one contiguous range of bytes."""

    @property
    def row_axis(self) -> int:
        """Axis of the stored array that counts rows."""
        return 1 if self.layout == "layer_major" else 0


class GroupHeader(msgspec.Struct, frozen=True):
    """What the header bytes say. `samples[m]` maps the names of non-column fields of `Sample` to packed values."""

    schema_version: int
    summary: GroupSummary
    columns: list[ColumnSpec]
    samples: list[dict[str, Any]]


class _Versioned(msgspec.Struct):
    schema_version: int


@dataclass(frozen=True)
class EncodedGroup:
    """A group ready to be published: `header` bytes and `columns` by name, in the order of the header's table."""

    header: bytes
    columns: dict[str, Array]


def encode_group(samples: Sequence[Sample], *, reward_key: str | None = None) -> EncodedGroup:
    """Header and columns of one group: tokens int32 [sum total length], loss_mask uint8 [sum R] and
    sampler_log_probs float32 [sum R].

    Raises `SampleError` naming the sample and the path of a value that can't be stored, or a field whose length or
    numbers break the contract of `Sample`.
    """
    summary = summarize(samples, reward_key=reward_key)
    specs: list[ColumnSpec] = []
    columns: dict[str, Array] = {}

    def add(name: str, dtype: str, rows: list[Array], absent: list[int]) -> None:
        offsets = [0, *np.cumsum([len(array) for array in rows]).tolist()]
        columns[name] = np.concatenate(rows).astype(DTYPES[dtype])
        specs.append(ColumnSpec(name, dtype, list(columns[name].shape), offsets, absent))

    add("tokens", "int32", [_integers(s, "tokens", s.tokens, len(s.tokens), 2**31 - 1) for s in samples], [])
    masks = [s.loss_mask if s.loss_mask is not None else [1] * s.response_length for s in samples]
    add(
        "loss_mask",
        "uint8",
        [_integers(s, "loss_mask", mask, s.response_length, 1) for s, mask in zip(samples, masks, strict=True)],
        [member for member, sample in enumerate(samples) if sample.loss_mask is None],
    )
    add(
        "sampler_log_probs",
        "float32",
        [_log_probs(sample) for sample in samples],
        [member for member, sample in enumerate(samples) if sample.rollout_log_probs is None],
    )
    header = GroupHeader(SCHEMA_VERSION, summary, specs, [_pack_fields(sample) for sample in samples])
    return EncodedGroup(msgspec.msgpack.encode(header), columns)


def read_header(data: bytes) -> GroupHeader:
    """Parsed header. Raises `SchemaVersionError` for a newer layout and `CorruptDataError` for anything unreadable."""
    try:
        version = msgspec.msgpack.decode(data, type=_Versioned).schema_version
        if version > SCHEMA_VERSION:
            raise SchemaVersionError(
                f"A group header has schema version {version}, this code reads up to {SCHEMA_VERSION}.",
                next_step="Update vime to the version that wrote the pool.",
            )
        return msgspec.msgpack.decode(data, type=GroupHeader, ext_hook=unpack_extension)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptDataError(f"A group header of {len(data)} bytes can't be read: {error}.") from error


def summary_from_header(data: bytes) -> GroupSummary:
    """The summary that was stored with the group. Raises as `read_header`."""
    return read_header(data).summary


def decode_group(header: bytes, columns: Mapping[str, Array]) -> list[Sample]:
    """The samples that were encoded; log-probabilities come back rounded to float32.

    Raises `SchemaVersionError` or `CorruptDataError`.
    """
    parsed = read_header(header)
    specs = {spec.name: spec for spec in parsed.columns}
    samples = [_unpack_fields(fields) for fields in parsed.samples]
    for field, name in _COLUMN_FIELDS.items():
        if name not in specs or name not in columns:
            raise CorruptDataError(f"Group {parsed.summary.group_index} has no column {name!r}, found {list(columns)}.")
        spec = specs[name]
        array = columns[name]
        if len(spec.row_offsets) != len(samples) + 1 or spec.row_offsets[-1] != array.shape[spec.row_axis]:
            raise CorruptDataError(
                f"Column {name!r} of group {parsed.summary.group_index} has {array.shape[spec.row_axis]} rows, "
                f"its row offsets are {spec.row_offsets} for {len(samples)} samples."
            )
        for member, sample in enumerate(samples):
            rows = array[spec.row_offsets[member] : spec.row_offsets[member + 1]]
            setattr(sample, field, None if member in spec.absent else rows.tolist())
    return samples


def _where(sample: Sample) -> str:
    return f"sample {sample.index} of group {sample.group_index}"


def _integers(sample: Sample, field: str, values: Sequence[int], length: int, maximum: int) -> Array:
    if len(values) != length:
        raise SampleError(f"{_where(sample)}: {field} has {len(values)} entries, allowed: {length}.")
    if values and (set(map(type, values)) != {int} or not 0 <= min(values) <= max(values) <= maximum):
        for position, value in enumerate(values):
            if type(value) is not int or not 0 <= value <= maximum:
                raise SampleError(
                    f"{_where(sample)}: {field}[{position}] is {value!r}, allowed: an int from 0 to {maximum}."
                )
    return np.asarray(values, np.int64)


def _log_probs(sample: Sample) -> Array:
    if sample.rollout_log_probs is None:
        return np.zeros(sample.response_length, np.float32)
    if len(sample.rollout_log_probs) != sample.response_length:
        raise SampleError(
            f"{_where(sample)}: rollout_log_probs has {len(sample.rollout_log_probs)} entries, "
            f"allowed: {sample.response_length}."
        )
    if not set(map(type, sample.rollout_log_probs)) <= {int, float}:
        position, value = next(
            (position, value)
            for position, value in enumerate(sample.rollout_log_probs)
            if type(value) not in (int, float)
        )
        raise SampleError(f"{_where(sample)}: rollout_log_probs[{position}] is {value!r}, allowed: float or int.")
    exact = np.asarray(sample.rollout_log_probs, np.float64)
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float32)
    overflow = np.flatnonzero(np.isinf(rounded) & np.isfinite(exact))
    if overflow.size:
        position = int(overflow[0])
        raise SampleError(f"{_where(sample)}: rollout_log_probs[{position}] is {exact[position]}, beyond float32.")
    return rounded


def _pack_fields(sample: Sample) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in sorted(_FIELDS):
        value = sample.status.value if name == "status" else vars(sample)[name]
        try:
            fields[name] = pack(value, name)
        except SampleError as error:
            raise SampleError(f"{_where(sample)}: {error.message}", next_step=error.next_step) from error
    return fields


def _unpack_fields(fields: dict[str, Any]) -> Sample:
    unknown = fields.keys() - _FIELDS
    if unknown:
        raise CorruptDataError(f"A group header names unknown sample fields {sorted(unknown)}.")
    try:
        return Sample(**{**fields, "status": Sample.Status(fields["status"])})
    except (KeyError, ValueError) as error:
        raise CorruptDataError(f"A group header has a bad sample status: {error}.") from error
