"""What each member gives to one column, and the column that they make together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vime.errors import SampleError
from vime.utils.types import Sample

Array = npt.NDArray[Any]
DTYPES = {
    "uint8": "|u1",
    "uint16": "<u2",
    "int32": "<i4",
    "int64": "<i8",
    "float16": "<f2",
    "float32": "<f4",
}
"""Column dtypes by name, with the byte order on disk."""


@dataclass(frozen=True)
class ColumnRows:
    """One column before it is put together: `rows[m]` are those of member m, rows first, shape [rows, ...]."""

    name: str
    dtype: str
    rows: list[Array]
    absent: list[int]
    """Members whose field is None."""

    def row_offsets(self) -> list[int]:
        """[members + 1] where each member's rows begin, then their number."""
        return [0, *np.cumsum([len(array) for array in self.rows]).tolist()]


def place(sample: Sample) -> str:
    """How messages name a sample."""
    return f"sample {sample.index} of group {sample.group_index}"


def optional_column(name: str, dtype: str, samples: Sequence[Sample], rows: Sequence[Array | None]) -> list[ColumnRows]:
    """The column of a field that may be None: no column when it is None everywhere; a member without it has no rows.

    Raises `SampleError` naming the first member whose rows have another shape than those before.
    """
    absent = [member for member, array in enumerate(rows) if array is None]
    present = [array for array in rows if array is not None]
    if not present:
        return []
    shape = present[0].shape[1:]
    for sample, array in zip(samples, rows, strict=True):
        if array is not None and array.shape[1:] != shape:
            raise SampleError(
                f"{place(sample)}: rows of {name} have shape {list(array.shape[1:])}, allowed: {list(shape)}, that of "
                "the members before.",
                reason="rows_of_members_differ",
            )
    empty = np.zeros((0, *shape), present[0].dtype)
    return [ColumnRows(name, dtype, [empty if array is None else array for array in rows], absent)]


def narrow(exact: Array, dtype: str, where: str) -> Array:
    """Floats in a narrower dtype. Raises `SampleError` naming `where` for a finite one that becomes infinite."""
    limit = float(np.finfo(dtype).max)
    if exact.size and not (-limit <= exact.min() and exact.max() <= limit):  # NaN comes here too
        beyond = np.isfinite(exact) & (np.abs(exact) > limit)
        if beyond.any():
            position = int(np.argmax(beyond))
            raise SampleError(
                f"{where}[{position}] is {exact.reshape(-1)[position]}, beyond {dtype}.", reason="log_prob_not_finite"
            )
    return exact.astype(DTYPES[dtype])
