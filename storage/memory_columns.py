"""A column in a pool in memory: small ones are one part of their publication, large ones a part for each member."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from storage.columns import DTYPES, Array, ColumnSpec, Layout
from storage.refs import GroupRef, PoolRef
from vime.errors import CorruptDataError, StorageError

SPLIT_BYTES = 256 << 10
"""A column of so many bytes is kept as one part for each member, so that who trains one fetches no other's rows."""


@dataclass(frozen=True)
class KeptColumn:
    """One column, and which parts of the publication hold it."""

    spec: ColumnSpec
    first: int

    @cached_property
    def is_split(self) -> bool:
        """Whether each member's rows are a part of their own."""
        dtype = DTYPES.get(self.spec.dtype)
        return dtype is not None and math.prod(self.spec.shape) * np.dtype(dtype).itemsize >= SPLIT_BYTES

    @cached_property
    def numbers(self) -> range:
        return range(self.first, self.first + (len(self.spec.row_offsets) - 1 if self.is_split else 1))

    def cut(self, array: Array) -> list[Array]:
        """The arrays of the parts."""
        if not self.is_split:
            return [array]
        return np.split(array, self.spec.row_offsets[1:-1], axis=self.spec.row_axis)

    def array(self, part: int, data: bytes, ref: PoolRef) -> Array:
        """A part out of its bytes. Raises `CorruptDataError`."""
        spec, shape = self.spec, list(self.spec.shape)
        if spec.dtype not in DTYPES:
            raise CorruptDataError(
                f"{ref.path}: column {spec.name!r} has dtype {spec.dtype!r}, allowed: {list(DTYPES)}."
            )
        if self.is_split:
            shape[spec.row_axis] = spec.row_offsets[part + 1] - spec.row_offsets[part]
        try:
            return np.frombuffer(data, DTYPES[spec.dtype]).reshape(shape)
        except ValueError as error:
            raise CorruptDataError(
                f"{ref.path}: column {spec.name!r} has {len(data)} bytes, its shape is {shape} of {spec.dtype}."
            ) from error

    def joined(self, payloads: Sequence[bytes], ref: PoolRef) -> Array:
        """The whole column out of the bytes of its parts."""
        arrays = [self.array(part, data, ref) for part, data in enumerate(payloads)]
        return np.concatenate(arrays, axis=self.spec.row_axis) if self.is_split else arrays[0]


def checked_rows(spec: ColumnSpec, ref: GroupRef, layout: Layout, member: int, start: int, stop: int | None) -> range:
    """Rows of the stored array that are rows `start:stop` of a member. Raises `StorageError`."""
    what = f"{ref.path}: column {spec.name!r}"
    if spec.layout != layout:
        raise StorageError(f"{what} is {spec.layout}.", next_step="Use read_rows or read_layers, as it is.")
    if not 0 <= member < len(spec.row_offsets) - 1:
        raise StorageError(f"{what} has {len(spec.row_offsets) - 1} members, member {member} was asked for.")
    first, last = spec.row_offsets[member], spec.row_offsets[member + 1]
    rows = range(start, last - first if stop is None else stop)
    if not 0 <= rows.start <= rows.stop <= last - first:
        raise StorageError(f"{what} has {last - first} rows of member {member}, {rows} was asked for.")
    return range(first + rows.start, first + rows.stop)
