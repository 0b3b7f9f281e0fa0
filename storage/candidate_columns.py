"""Columns of the sampler's candidates: the top k of each token, or the ragged tokens that top-p left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from storage.column_rows import Array, ColumnRows, narrow, optional_column, place
from vime.errors import SampleError
from vime.utils.types import Sample

MAX_ID = 2**31 - 1


def candidate_columns(samples: Sequence[Sample], sc_dtype: str) -> list[ColumnRows]:
    """top_k_ids int32 [R, k], top_p_ids int32 [N], top_p_offsets int32 [R + 1], and the log-probabilities of both.

    Offsets are those of the member, from 0. Raises `SampleError` naming sample and field.
    """

    def ints(name: str, field: str, num_axes: int) -> list[ColumnRows]:
        return optional_column(name, "int32", samples, [_ids(sample, field, num_axes) for sample in samples])

    def floats(name: str, field: str, num_axes: int) -> list[ColumnRows]:
        rows = [_log_probs(sample, field, num_axes, sc_dtype) for sample in samples]
        return optional_column(name, sc_dtype, samples, rows)

    return [
        *ints("top_k_ids", "rollout_topk_token_ids", 2),
        *floats("top_k_log_probs", "rollout_topk_log_probs", 2),
        *ints("top_p_ids", "rollout_top_p_token_ids", 1),
        *ints("top_p_offsets", "rollout_top_p_token_offsets", 1),
        *floats("top_p_log_probs", "rollout_top_p_log_probs", 1),
    ]


def _ids(sample: Sample, field: str, num_axes: int) -> Array | None:
    array = candidate_array(sample, field, num_axes, "iu")
    if array is None:
        return None
    if array.size and (array.min() < 0 or array.max() > MAX_ID):
        raise SampleError(
            f"{place(sample)}: {field} runs from {array.min()} to {array.max()}, allowed: 0 to {MAX_ID}.",
            reason="sc_id_range",
        )
    return array


def _log_probs(sample: Sample, field: str, num_axes: int, dtype: str) -> Array | None:
    array = candidate_array(sample, field, num_axes, "fiu")
    return None if array is None else narrow(array, dtype, f"{place(sample)}: {field}")


def candidate_array(sample: Sample, field: str, num_axes: int, kinds: str) -> Array | None:
    """A candidate field as an array with so many axes; lists are converted. Raises `SampleError`."""
    value: Any = vars(sample)[field]
    if value is None:
        return None
    try:
        array = np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise SampleError(f"{place(sample)}: {field} can't be read: {error}.", reason="sc_rows") from error
    if array.size == 0 and not isinstance(value, np.ndarray):
        array = array.astype(np.int32)  # an empty list has no type
    if array.ndim != num_axes or array.dtype.kind not in kinds:
        raise SampleError(
            f"{place(sample)}: {field} is {array.dtype} with {array.ndim} axes, allowed: "
            f"{'integers' if kinds == 'iu' else 'floats'} with {num_axes}.",
            reason="sc_rows",
        )
    return array
