"""Everything of a sample that is not a number a token, as bytes: a column of small fields, and one for each kind of
media.

A reader of tokens never touches them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from storage.column_rows import Array, ColumnRows, optional_column, place
from storage.values import pack, unpack_extension
from vime.errors import CorruptDataError, SampleError
from vime.utils.types import Sample

FIELDS = "fields"
MEDIA = ("multimodal_inputs", "multimodal_train_inputs")
"""Columns and fields of the same name."""

_DEFAULTS = Sample().to_dict()
_decoder = msgspec.msgpack.Decoder(dict[str, Any], ext_hook=unpack_extension)


def packed_columns(samples: Sequence[Sample], not_packed: frozenset[str]) -> list[ColumnRows]:
    """uint8 columns: `fields` with all attributes but the media and `not_packed`, and those of `MEDIA`.

    The loss mask of a removed sample is packed, because its column holds zeros. Raises `SampleError` naming the
    sample and the path of a value that can't be stored.
    """
    columns = [ColumnRows(FIELDS, "uint8", [_pack_fields(sample, not_packed) for sample in samples], [])]
    for name in MEDIA:
        rows = [
            None if vars(sample)[name] is None else _bytes(sample, {name: vars(sample)[name]}) for sample in samples
        ]
        columns += optional_column(name, "uint8", samples, rows)
    return columns


def unpack_member(columns: Mapping[str, Array]) -> Sample:
    """The sample of one member's rows of the packed columns. Raises `CorruptDataError`."""
    values: dict[str, Any] = {}
    try:
        for name in (FIELDS, *MEDIA):
            if name in columns and len(columns[name]):
                values |= _decoder.decode(columns[name].tobytes())
        return Sample.from_dict(values)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise CorruptDataError(f"The fields of a sample can't be read: {error}.") from error


def _pack_fields(sample: Sample, not_packed: frozenset[str]) -> Array:
    values = {
        name: value
        for name, value in sorted(sample.to_dict().items())
        if name not in not_packed and name not in MEDIA and not _is_default(name, value)
    }
    if sample.remove_sample and sample.loss_mask is not None:
        values["loss_mask"] = sample.loss_mask
    return _bytes(sample, values)


def _is_default(name: str, value: object) -> bool:
    """Left out, because reading gives it back."""
    default = _DEFAULTS.get(name, ...)
    return type(value) is type(default) and bool(value == default)


def _bytes(sample: Sample, values: Mapping[str, object]) -> Array:
    try:
        packed = {name: pack(value, name) for name, value in values.items()}
    except SampleError as error:
        raise SampleError(
            f"{place(sample)}: {error.message}", next_step=error.next_step, reason=error.reason
        ) from error
    return np.frombuffer(msgspec.msgpack.encode(packed), np.uint8)
