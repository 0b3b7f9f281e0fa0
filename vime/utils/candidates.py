"""The sampler's candidates of appended tokens: its k most probable ones, or all that top-p left to sample from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vime.errors import SampleError

if TYPE_CHECKING:
    from vime.utils.types import Sample

Ids = npt.NDArray[np.int32]
LogProbs = npt.NDArray[np.float32]
MAX_ID = 2**31 - 1


def candidate_rows(
    sample: Sample, args: Any, count: int, trainable: bool, meta_info: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """The sample's candidate fields after `count` more tokens; empty when it has none and none are needed.

    They are needed when `args` says `use_score_centering`: those of top-p when `rollout_top_p` is below 1, else the
    top k. Raises `SampleError` when trainable tokens, new or old ones, lack them, or the lengths don't agree.
    """
    centering = args is not None and args.use_score_centering
    truncated = args is not None and args.rollout_top_p < 1
    top_k = meta_info.get("score_centering_topk") if trainable else None
    top_p = meta_info.get("score_centering_top_p") if trainable else None
    changes: dict[str, Any] = {}
    has_top_k, has_top_p = sample.rollout_topk_token_ids is not None, sample.rollout_top_p_token_offsets is not None
    if top_k is not None or has_top_k or (centering and not truncated):
        _refuse_a_gap(sample, trainable, top_k is not None, has_top_k, where)
        changes |= _top_k(sample, count, top_k, args.score_centering_top_k if args is not None else 1, where)
    if top_p is not None or has_top_p or (centering and truncated):
        _refuse_a_gap(sample, trainable, top_p is not None, has_top_p, where)
        changes |= _top_p(sample, count, top_p, where)
    return changes


def _refuse_a_gap(sample: Sample, trainable: bool, given: bool, present: bool, where: str) -> None:
    has_trainable = sample.response_length > 0 and (sample.loss_mask is None or any(sample.loss_mask))
    if (has_trainable and not present) or (trainable and not given):
        which = "the trainable tokens before" if has_trainable and not present else "new trainable tokens"
        raise SampleError(
            f"{where}: {which} have no candidates of the sampler, which score centering needs.",
            next_step="Ask the engine for them with every request, or start a new sample.",
            reason="sc_missing",
        )


def _top_k(sample: Sample, count: int, new: Any, default_width: int, where: str) -> dict[str, Any]:
    """Tokens that were not sampled get rows that count for nothing: ids 0 to k - 1, equally probable."""
    earlier_ids, earlier = sample.rollout_topk_token_ids, sample.rollout_topk_log_probs
    width = default_width if earlier_ids is None else earlier_ids.shape[1]
    if new is None:
        ids, log_probs = _uniform(count, width)
    else:
        ids, log_probs = _ids(new[0], where), np.asarray(new[1], np.float32)
        width = ids.shape[1] if earlier_ids is None and ids.ndim == 2 else width
        if not ids.shape == log_probs.shape == (count, width):
            raise SampleError(
                f"{where}: score_centering_topk has ids {list(ids.shape)} and log-probabilities "
                f"{list(log_probs.shape)}, allowed: both [{count}, {width}].",
                reason="sc_rows",
            )
    if earlier_ids is None or earlier is None:
        earlier_ids, earlier = _uniform(sample.response_length, width)
    return {
        "rollout_topk_token_ids": np.concatenate([earlier_ids, ids]),
        "rollout_topk_log_probs": np.concatenate([earlier, log_probs]),
    }


def _top_p(sample: Sample, count: int, new: Any, where: str) -> dict[str, Any]:
    """Tokens that were not sampled get no entries."""
    new_ids, new_offsets, new_log_probs = ([], [0] * (count + 1), []) if new is None else new
    ids, log_probs = _ids(new_ids, where), np.asarray(new_log_probs, np.float32)
    offsets = np.asarray(new_offsets, np.int64)
    if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != len(ids) or len(ids) != len(log_probs):
        raise SampleError(
            f"{where}: score_centering_top_p has {len(ids)} ids, {len(log_probs)} log-probabilities and the offsets "
            f"{offsets[:1].tolist()} to {offsets[-1:].tolist()} of {len(offsets) - 1} tokens; allowed: {count} tokens, "
            "offsets from 0 to the number of ids.",
            reason="top_p_offsets",
        )
    before = sample.rollout_top_p_token_offsets
    if before is None:
        before = np.zeros(sample.response_length + 1, np.int32)
    return {
        "rollout_top_p_token_ids": _after(sample.rollout_top_p_token_ids, ids),
        "rollout_top_p_token_offsets": np.concatenate([before, before[-1] + offsets[1:]]).astype(np.int32),
        "rollout_top_p_log_probs": _after(sample.rollout_top_p_log_probs, log_probs),
    }


def _after(earlier: Any, new: Any) -> Any:
    return new if earlier is None else np.concatenate([earlier, new])


def _uniform(count: int, width: int) -> tuple[Ids, LogProbs]:
    ids = np.tile(np.arange(width, dtype=np.int32), (count, 1))
    return ids, np.full((count, width), -math.log(width), np.float32)


def _ids(values: Any, where: str) -> Ids:
    """As int32, never wrapped around."""
    ids = np.asarray(values, np.int64)
    if ids.size and (ids.min() < 0 or ids.max() > MAX_ID):
        raise SampleError(
            f"{where}: candidate ids run from {ids.min()} to {ids.max()}, allowed: 0 to {MAX_ID}.", reason="sc_id_range"
        )
    return ids.astype(np.int32)
