"""What a group must be like before the queue takes it: a sample that training could not use is refused here.

Each refusal is a `SampleError` whose `reason` is one word, by which refusals are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.candidate_checks import check_top_k, check_top_p
from storage.column_rows import place
from storage.route_checks import RouteShape, check_routes
from storage.token_columns import log_probs_of, mask_of, token_ids_of
from vime.errors import SampleError
from vime.utils.types import Sample

FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


@dataclass(frozen=True)
class EnqueueRequirements:
    """What the objective needs of every trainable token, and the limits of a sample."""

    sampled: bool = True
    """Trainable tokens need a log-probability and a policy version; not so in supervised fine-tuning."""
    routes: RouteShape | None = None
    """Routes are replayed (R3), and are of this shape."""
    sc_top_k: int | None = None
    """Score centering needs so many candidates of every token."""
    top_p: bool = False
    """Every trainable token needs what top-p left to sample from."""
    teacher: bool = False
    """Every trainable sample needs a log-probability of each token under a teacher."""
    max_tokens: int | None = None
    """Most tokens of prompt and response that the trainer can take."""
    vocab_size: int | None = None
    """Token ids must be below it."""


def check_enqueue(samples: Sequence[Sample], needs: EnqueueRequirements) -> None:
    """Raise `SampleError` for the first sample that can't be trained as `needs` says."""
    for sample in samples:
        check_sample(sample, needs)


def check_sample(sample: Sample, needs: EnqueueRequirements) -> None:
    """Raise `SampleError` unless this sample can be trained as `needs` says.

    Looks at every number of every per-token field; see the checks of each kind for what is refused.
    """
    mask = _check_lengths(sample, needs)
    log_probs = _check_log_probs(sample, needs, mask)
    _check_spans(sample, needs, mask)
    is_trained = bool(mask.any())
    if needs.teacher and is_trained:
        _check_teacher(sample)
    if needs.routes is not None and (is_trained or sample.rollout_routed_experts is not None):
        check_routes(sample, needs.routes)
    if needs.sc_top_k is not None and (is_trained or sample.rollout_topk_token_ids is not None):
        check_top_k(sample, needs.sc_top_k, needs.vocab_size)
    if needs.top_p and (is_trained or sample.rollout_top_p_token_ids is not None):
        check_top_p(sample, mask, log_probs, needs.vocab_size)


def _check_lengths(sample: Sample, needs: EnqueueRequirements) -> npt.NDArray[np.bool_]:
    """Status, numbers of tokens and loss mask; the mask of what is trained, [R]."""
    if sample.status not in FINISHED:
        raise SampleError(
            f"{place(sample)}: status is {sample.status.value}, allowed: completed, truncated.", reason="status"
        )
    num_tokens, length = len(sample.tokens), sample.response_length
    if not 0 < length < num_tokens:
        raise SampleError(
            f"{place(sample)}: response_length is {length} of {num_tokens} tokens; allowed: at least one prompt token "
            "and one response token.",
            reason="response_length",
        )
    if needs.max_tokens is not None and num_tokens > needs.max_tokens:
        raise SampleError(
            f"{place(sample)}: it has {num_tokens} tokens, allowed: {needs.max_tokens}.",
            next_step="Lower --rollout-max-response-len, or raise --max-tokens-per-gpu.",
            reason="token_budget",
        )
    _check_vocabulary(sample, needs.vocab_size)
    return mask_of(sample).astype(bool)


def _check_vocabulary(sample: Sample, vocab_size: int | None) -> None:
    greatest = int(token_ids_of(sample).max())
    if vocab_size is not None and greatest >= vocab_size:
        raise SampleError(
            f"{place(sample)}: the greatest token id is {greatest}, allowed: {vocab_size - 1}.", reason="token_id"
        )


def _check_log_probs(sample: Sample, needs: EnqueueRequirements, mask: npt.NDArray[np.bool_]) -> Any:
    """Finite and not above zero, masked tokens included; float32 [R], or None where there are none."""
    if sample.rollout_log_probs is None:
        if needs.sampled and mask.any():
            raise SampleError(
                f"{place(sample)}: there are no rollout_log_probs, allowed: {sample.response_length}.",
                reason="log_probs_missing",
            )
        return None
    log_probs = log_probs_of(sample, "rollout_log_probs")
    for reason, bad, allowed in (
        ("log_prob_not_finite", ~np.isfinite(log_probs), "a finite number"),
        ("log_prob_above_zero", log_probs > 0.0, "zero or less"),
    ):
        if bad.any():
            position = int(np.argmax(bad))
            raise SampleError(
                f"{place(sample)}: rollout_log_probs[{position}] is {log_probs[position]}, allowed: {allowed}.",
                next_step="The engine's weights or its sampler may be damaged; look at its log.",
                reason=reason,
            )
    return log_probs


def _check_teacher(sample: Sample) -> None:
    """One finite number for each response token, not above zero."""
    if sample.teacher_log_probs is None:
        raise SampleError(
            f"{place(sample)}: there are no teacher_log_probs, allowed: {sample.response_length}.",
            next_step="Look at the teacher's engine, or leave out --use-opd.",
            reason="teacher_log_probs_missing",
        )
    log_probs = log_probs_of(sample, "teacher_log_probs")
    bad = ~(np.isfinite(log_probs) & (log_probs <= 0.0))
    if bad.any():
        position = int(np.argmax(bad))
        raise SampleError(
            f"{place(sample)}: teacher_log_probs[{position}] is {log_probs[position]}, allowed: a finite number, zero "
            "or less.",
            reason="teacher_log_prob",
        )


def _check_spans(sample: Sample, needs: EnqueueRequirements, mask: npt.NDArray[np.bool_]) -> None:
    """In order, without overlap, inside the response; every trained token has a version."""
    has_version = np.zeros(sample.response_length, bool)
    position = 0
    for version, start, stop in sample.version_spans:
        if version < 0 or not position <= start < stop <= sample.response_length:
            raise SampleError(
                f"{place(sample)}: version span ({version}, {start}, {stop}) does not lie between {position} and "
                f"{sample.response_length}.",
                reason="version_spans",
            )
        has_version[start:stop] = True
        position = stop
    unlabelled = mask & ~has_version
    if needs.sampled and unlabelled.any():
        raise SampleError(
            f"{place(sample)}: response token {int(np.argmax(unlabelled))} is trained, but no version span covers it "
            f"(they are {sample.version_spans[:8]}).",
            reason="version_missing",
        )
