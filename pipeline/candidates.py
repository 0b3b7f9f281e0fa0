"""The sampler's candidates of a microbatch's response tokens, read as the objective asks for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.members import StoredMember
from storage.columns import Array
from vime.data.batch import NucleusRows, TopKRows
from vime.errors import TrainerError
from vime.settings.groups import Settings


@dataclass(frozen=True)
class CandidateNeeds:
    """Which candidates the objective asks for; none by default."""

    top_k: int | None = None
    """So many of the most probable tokens at each position."""
    nucleus: bool = False
    """The tokens among which the sampler chose."""
    nucleus_log_probs: bool = False


def candidate_needs(settings: Settings) -> CandidateNeeds:
    """Score centering runs over the nucleus where top-p leaves one, over the most probable tokens elsewhere."""
    centers, has_nucleus = settings.objective.use_score_centering, settings.rollout.rollout_top_p < 1
    return CandidateNeeds(
        top_k=settings.objective.score_centering_top_k if centers and not has_nucleus else None,
        nucleus=has_nucleus,
        nucleus_log_probs=has_nucleus and centers,
    )


def read_top_k(members: Sequence[StoredMember], masks: Sequence[Array], k: int) -> TopKRows:
    """The k most probable tokens at each response token of `members`, whose loss masks are `masks` [R].

    Of wider rows the first k are taken, since they are sorted. A sample without candidates, which may not be trained,
    gets ids from 0 with equal probabilities: they add nothing and stay finite.

    Raises `TrainerError` for a trained sample without candidates, and for rows with fewer than k.
    """
    parts = [_top_k_of(member, mask, k) for member, mask in zip(members, masks, strict=True)]
    return TopKRows(np.concatenate([ids for ids, _ in parts]), np.concatenate([log_probs for _, log_probs in parts]))


def read_nucleus(members: Sequence[StoredMember], masks: Sequence[Array], *, log_probs: bool) -> NucleusRows:
    """What top-p left at each response token of `members`, whose loss masks are `masks` [R].

    A sample without it, which may not be trained, has no ids at any token. Raises `TrainerError` for a trained one.
    """
    offsets, ids, values = [np.zeros(1, np.int64)], [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
    for member, mask in zip(members, masks, strict=True):
        length = member.sample.response_length
        if not member.has("top_p_offsets"):
            _require_masked(member, mask, "tokens that top-p left")
            offsets.append(np.repeat(offsets[-1][-1:], length))
            continue
        ends = member.rows("top_p_offsets", length + 1)[1:].astype(np.int64)
        offsets.append(ends + offsets[-1][-1])
        ids.append(member.rows("top_p_ids", int(ends[-1])))
        if log_probs:
            values.append(member.rows("top_p_log_probs", int(ends[-1])).astype(np.float32))
    return NucleusRows(np.concatenate(ids), np.concatenate(offsets), np.concatenate(values) if log_probs else None)


def read_teacher(members: Sequence[StoredMember]) -> Array | None:
    """A teacher's log-probabilities [R] that came with the samples of `members`; None where no sample has any.

    Those of a sample without them, which is not trained where they are needed, are zeros.
    """
    if not any(member.has("teacher_log_probs") for member in members):
        return None
    lengths = [member.sample.response_length for member in members]
    return np.concatenate(
        [
            member.rows("teacher_log_probs", length)
            if member.has("teacher_log_probs")
            else np.zeros(length, np.float32)
            for member, length in zip(members, lengths, strict=True)
        ]
    )


def _top_k_of(member: StoredMember, mask: Array, k: int) -> tuple[Array, Array]:
    """Ids int32 [R, k] and log-probabilities float32 [R, k]."""
    length = member.sample.response_length
    if not member.has("top_k_ids"):
        _require_masked(member, mask, "candidates")
        return np.tile(np.arange(k, dtype=np.int32), (length, 1)), np.full((length, k), -math.log(2 * k), np.float32)
    ids, log_probs = member.rows("top_k_ids", length), member.rows("top_k_log_probs", length)
    if ids.shape[1] < k:
        raise TrainerError(
            f"sample {member.sample.sample_index}: {ids.shape[1]} candidates are stored of each token, "
            f"allowed: at least {k} (--score-centering-top-k).",
            next_step=f"Give --score-centering-top-k {ids.shape[1]}, or start with an empty queue.",
        )
    return ids[:, :k], log_probs[:, :k].astype(np.float32)


def _require_masked(member: StoredMember, mask: Array, what: str) -> None:
    if mask.any():
        raise TrainerError(
            f"sample {member.sample.sample_index}: no {what} are stored, but it has {int(np.count_nonzero(mask))} "
            "trained tokens, allowed: none.",
            next_step="It was generated without them: start with an empty queue, or train without score centering "
            "and --rollout-top-p.",
        )
