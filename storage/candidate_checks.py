"""The sampler's candidates must be probabilities of different tokens, for each token that is trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from storage.candidate_columns import candidate_array
from storage.column_rows import Array, place
from vime.errors import SampleError
from vime.utils.types import Sample

MASS_TOLERANCE = 1e-3
"""How far the sum of probabilities may be above (for top-p: from) 1; float32 sums of thousands stay far below it."""
SAMPLED_RTOL, SAMPLED_ATOL = 1e-4, 1e-5
"""How close the sampled token's log-probability must be to its entry among the candidates."""


def check_top_k(sample: Sample, k: int, vocab_size: int | None) -> None:
    """Raise `SampleError` unless there are k candidates for each response token: different ids, log-probabilities
    finite, not above zero, the greatest first, and probabilities that sum to no more than 1."""
    ids = candidate_array(sample, "rollout_topk_token_ids", 2, "iu")
    log_probs = candidate_array(sample, "rollout_topk_log_probs", 2, "f")
    if ids is None or log_probs is None:
        raise SampleError(
            f"{place(sample)}: there are no rollout_topk_token_ids and rollout_topk_log_probs, which score centering "
            "needs.",
            reason="sc_missing",
        )
    wanted = (sample.response_length, k)
    if ids.shape != wanted or log_probs.shape != wanted:
        raise SampleError(
            f"{place(sample)}: candidates have ids {list(ids.shape)} and log-probabilities {list(log_probs.shape)}, "
            f"allowed: both {list(wanted)}.",
            reason="sc_rows",
        )
    _check_ids(sample, ids, vocab_size)
    _check_values(sample, log_probs)
    rising = np.asarray((log_probs[:, 1:] > log_probs[:, :-1]).any(axis=1))
    _refuse_row(sample, rising, "candidates are not sorted, the most probable first", "sc_not_sorted")
    too_much = np.exp(log_probs).sum(axis=1) > 1 + MASS_TOLERANCE
    _refuse_row(sample, too_much, "probabilities of the candidates sum to more than 1", "sc_mass")
    in_order = np.sort(ids, axis=1)
    twice = np.asarray((in_order[:, 1:] == in_order[:, :-1]).any(axis=1))
    _refuse_row(sample, twice, "a candidate occurs twice", "sc_ids_repeated")


def check_top_p(
    sample: Sample,
    mask: npt.NDArray[np.bool_],
    sampler_log_probs: npt.NDArray[np.float32] | None,
    vocab_size: int | None,
) -> None:
    """Raise `SampleError` unless each trained token (`mask` [R]) has the tokens that top-p left, itself among them.

    Ids must be different in each position, log-probabilities finite, not above zero and normalised, and that of the
    sampled token the same as in `sampler_log_probs` [R].
    """
    offsets, ids, log_probs = _top_p_fields(sample)
    _check_ids(sample, ids, vocab_size)
    _check_values(sample, log_probs)
    counts = np.diff(offsets)
    _refuse_row(sample, mask & (counts == 0), "no candidates of a trained token", "top_p_empty")
    rows = np.repeat(np.arange(len(counts)), counts)
    keys = np.sort(rows * np.int64(2**31) + ids)
    twice = np.zeros(len(counts), bool)
    twice[keys[1:][keys[1:] == keys[:-1]] >> 31] = True
    _refuse_row(sample, twice, "a candidate occurs twice", "sc_ids_repeated")
    masses = np.bincount(rows, np.exp(log_probs, dtype=np.float64), minlength=len(counts))
    wrong = (counts > 0) & (np.abs(masses - 1) > MASS_TOLERANCE)
    _refuse_row(sample, wrong, "probabilities of the candidates don't sum to 1", "sc_mass")
    _check_sampled(sample, mask, sampler_log_probs, rows, ids, log_probs)


def _top_p_fields(sample: Sample) -> tuple[Array, Array, Array]:
    ids = candidate_array(sample, "rollout_top_p_token_ids", 1, "iu")
    offsets = candidate_array(sample, "rollout_top_p_token_offsets", 1, "iu")
    log_probs = candidate_array(sample, "rollout_top_p_log_probs", 1, "fiu")
    if ids is None or offsets is None or log_probs is None:
        raise SampleError(
            f"{place(sample)}: rollout_top_p_token_ids, _token_offsets or _log_probs is missing, which replay of top-p "
            "needs.",
            reason="top_p_missing",
        )
    length = sample.response_length
    ends = (0, len(ids)) == (offsets[0], offsets[-1]) if len(offsets) == length + 1 else False
    if not ends or len(ids) != len(log_probs) or (np.diff(offsets.astype(np.int64)) < 0).any():
        raise SampleError(
            f"{place(sample)}: rollout_top_p_token_offsets has {len(offsets)} entries from {offsets[:1].tolist()} to "
            f"{offsets[-1:].tolist()} for {len(ids)} ids and {len(log_probs)} log-probabilities; allowed: {length + 1} "
            "entries that rise from 0 to the number of ids.",
            reason="top_p_offsets",
        )
    return offsets.astype(np.int64), ids, log_probs


def _check_sampled(
    sample: Sample,
    mask: npt.NDArray[np.bool_],
    sampler_log_probs: npt.NDArray[np.float32] | None,
    rows: Array,
    ids: Array,
    log_probs: Array,
) -> None:
    response = np.asarray(sample.tokens[-sample.response_length :])
    is_sampled = ids == response[rows]
    found = np.zeros(len(mask), bool)
    found[rows[is_sampled]] = True
    if (mask & ~found).any():
        position = int(np.argmax(mask & ~found))
        raise SampleError(
            f"{place(sample)}: response token {position} is {response[position]}, but top-p left "
            f"{ids[rows == position][:16].tolist()}.",
            next_step="The engine's sampling mask belongs to other tokens.",
            reason="top_p_sampled_token",
        )
    if sampler_log_probs is None:
        return
    entry = np.zeros(len(mask))
    entry[rows[is_sampled]] = log_probs[is_sampled]
    differs = mask & ~np.isclose(sampler_log_probs, entry, rtol=SAMPLED_RTOL, atol=SAMPLED_ATOL)
    if differs.any():
        position = int(np.argmax(differs))
        raise SampleError(
            f"{place(sample)}: rollout_log_probs[{position}] is {sampler_log_probs[position]}, but {entry[position]} "
            "among what top-p left; allowed: the same.",
            reason="top_p_log_prob",
        )


def _check_ids(sample: Sample, ids: Array, vocab_size: int | None) -> None:
    most = 2**31 - 1 if vocab_size is None else vocab_size - 1
    if ids.size and (ids.min() < 0 or ids.max() > most):
        raise SampleError(
            f"{place(sample)}: candidate ids run from {ids.min()} to {ids.max()}, allowed: 0 to {most}.",
            reason="sc_id_range",
        )


def _check_values(sample: Sample, log_probs: Array) -> None:
    if not log_probs.size or (log_probs.max() <= 0 and log_probs.min() > -np.inf):
        return  # NaN compares as neither
    for reason, bad, allowed in (
        ("sc_log_prob_not_finite", ~np.isfinite(log_probs), "a finite number"),
        ("sc_log_prob_above_zero", log_probs > 0, "zero or less"),
    ):
        if bad.any():
            position = tuple(int(index[0]) for index in np.nonzero(bad))
            value: Any = log_probs[position]
            raise SampleError(
                f"{place(sample)}: the candidates' log-probability at {list(position)} is {value}, allowed: {allowed}.",
                reason=reason,
            )


def _refuse_row(sample: Sample, bad: npt.NDArray[np.bool_], what: str, reason: str) -> None:
    """Raise for the first response token in `bad` [R]."""
    if bad.any():
        raise SampleError(f"{place(sample)}: {what}, at response token {int(np.argmax(bad))}.", reason=reason)
