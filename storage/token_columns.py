"""Columns with one number a token: ids, loss mask, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.column_rows import Array, ColumnRows, narrow, optional_column, place
from vime.errors import SampleError
from vime.utils.types import Sample

MAX_TOKEN_ID = 2**31 - 1


def token_columns(samples: Sequence[Sample]) -> list[ColumnRows]:
    """tokens int32 [T], loss_mask uint8 [R], sampler_log_probs float32 [R], teacher_log_probs float32 [R].

    Where a mask or the sampler's log-probabilities are None, ones and zeros stand in for them; the mask of a removed
    sample is zeros. Raises `SampleError` naming sample, field and position.
    """
    teacher = [
        None if sample.teacher_log_probs is None else log_probs_of(sample, "teacher_log_probs") for sample in samples
    ]
    return [
        ColumnRows("tokens", "int32", [token_ids_of(sample) for sample in samples], []),
        ColumnRows(
            "loss_mask",
            "uint8",
            [mask_of(sample) for sample in samples],
            [member for member, sample in enumerate(samples) if sample.loss_mask is None],
        ),
        ColumnRows(
            "sampler_log_probs",
            "float32",
            [
                np.zeros(sample.response_length, np.float32)
                if sample.rollout_log_probs is None
                else log_probs_of(sample, "rollout_log_probs")
                for sample in samples
            ],
            [member for member, sample in enumerate(samples) if sample.rollout_log_probs is None],
        ),
        *optional_column("teacher_log_probs", "float32", samples, teacher),
    ]


def log_probs_of(sample: Sample, field: str) -> npt.NDArray[np.float32]:
    """A field of R log-probabilities as float32 [R]; NaN and infinities are kept.

    Raises `SampleError` for another length, an entry that is no number, or one that float32 can't hold.
    """
    values: Any = vars(sample)[field]
    _check_length(sample, field, values, sample.response_length)
    if not isinstance(values, np.ndarray) and not set(map(type, values)) <= {int, float}:
        position = next(n for n, value in enumerate(values) if type(value) not in (int, float))
        raise SampleError(
            f"{place(sample)}: {field}[{position}] is {values[position]!r}, allowed: float or int.",
            reason="log_prob_missing" if values[position] is None else "log_prob_no_number",
        )
    return narrow(np.asarray(values, np.float64), "float32", f"{place(sample)}: {field}")


def token_ids_of(sample: Sample) -> npt.NDArray[np.int64]:
    """Token ids [T]. Raises `SampleError` for one that is no int from 0 to 2^31 - 1."""
    return _integers(sample, "tokens", sample.tokens, len(sample.tokens), MAX_TOKEN_ID)


def mask_of(sample: Sample) -> npt.NDArray[np.uint8]:
    """What is trained of the response, [R]. Raises `SampleError` for another length or an entry but 0 and 1."""
    if sample.loss_mask is not None:
        _integers(sample, "loss_mask", sample.loss_mask, sample.response_length, 1)
    return sample.mask_array()


def _integers(sample: Sample, field: str, values: Sequence[int] | Array, length: int, maximum: int) -> Array:
    _check_length(sample, field, values, length)
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu" and values.ndim == 1:
        bad = np.flatnonzero((values < 0) | (values > maximum))
        position = int(bad[0]) if bad.size else None
    elif not len(values) or (set(map(type, values)) == {int} and 0 <= min(values) <= max(values) <= maximum):
        position = None
    else:
        position = next(
            (number for number, value in enumerate(values) if type(value) is not int or not 0 <= value <= maximum), None
        )
    if position is not None:
        raise SampleError(
            f"{place(sample)}: {field}[{position}] is {values[position]!r}, allowed: an int from 0 to {maximum}.",
            reason="token_id" if field == "tokens" else "loss_mask",
        )
    return np.asarray(values, np.int64)


def _check_length(sample: Sample, field: str, values: Sequence[Any] | Array, length: int) -> None:
    if len(values) != length:
        raise SampleError(
            f"{place(sample)}: {field} has {len(values)} entries, allowed: {length}.",
            reason=f"{field}_length",
        )
