"""Adding tokens to a sample: what each per-token field gets, so that all of them stay equally long.

What the engine said besides the tokens (`meta_info`), every key optional:

    finish_reason            {"type": "stop" | "length" | "abort"}
    weight_version           policy version that made the tokens
    version_spans            [(policy version, start, stop)] over the new tokens, when more than one made them
    score_centering_topk     (ids [n, k], log-probabilities [n, k]) of the sampler's most probable tokens
    score_centering_top_p    (ids [N], offsets [n + 1], log-probabilities [N]) of the tokens that top-p left
    routed_experts           [rows, L, K] of all tokens but the last, from row `routed_experts_prompt_start` on
    routed_experts_prompt_start    first row of `routed_experts`, default 0
    spec_accept_token_num, spec_draft_token_num, spec_verify_ct    speculative decoding
    cached_tokens, prompt_tokens                                   prefix cache
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vime.errors import SampleError
from vime.utils.candidates import candidate_rows
from vime.utils.routed_experts import continue_routes

if TYPE_CHECKING:
    from vime.utils.types import Sample

_STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted"}


def append_tokens(
    sample: Sample,
    args: Any,
    tokens: list[int],
    log_probs: Sequence[float] | None,
    trainable: bool,
    meta_info: Mapping[str, Any],
    text: str,
    update_terminal_info: bool,
) -> None:
    """`Sample.append_response_tokens`. Everything is computed and checked first; then the sample changes."""
    where = f"sample {sample.index} of group {sample.group_index}"
    _check_lengths(sample, where)
    before, count = sample.response_length, len(tokens)
    changes: dict[str, Any] = {
        "tokens": [*sample.tokens, *tokens],
        "response_length": before + count,
        "response": sample.response + text,
        "loss_mask": [*(sample.loss_mask if sample.loss_mask is not None else [1] * before), *[int(trainable)] * count],
        "rollout_log_probs": _log_probs(sample, count, log_probs, trainable, where),
        **_versions(sample, count, trainable, meta_info),
        **candidate_rows(sample, args, count, trainable and count > 0, meta_info, where),
    }
    if meta_info.get("routed_experts") is not None:
        start = int(meta_info.get("routed_experts_prompt_start", 0))
        num_rows = max(0, len(changes["tokens"]) - 1 - start)
        changes["rollout_routed_experts"] = continue_routes(
            sample.rollout_routed_experts, meta_info["routed_experts"], start, num_rows, where
        )
    if update_terminal_info and "finish_reason" in meta_info:
        changes["status"] = _status(sample, meta_info["finish_reason"], where)
    vars(sample).update(changes)
    _count(sample, count if trainable else 0, meta_info)


def _check_lengths(sample: Sample, where: str) -> None:
    """Raise unless the fields agree before anything is added."""
    length = sample.response_length
    for name, expected in {
        "loss_mask": length,
        "rollout_log_probs": length,
        "rollout_topk_token_ids": length,
        "rollout_topk_log_probs": length,
        "rollout_top_p_token_offsets": length + 1,
    }.items():
        value = vars(sample)[name]
        if value is not None and len(value) != expected:
            raise SampleError(f"{where}: {name} has {len(value)} entries, allowed: {expected}.", reason="lengths")


def _log_probs(
    sample: Sample, count: int, log_probs: Sequence[float] | None, trainable: bool, where: str
) -> list[float] | None:
    if not trainable and log_probs is not None:
        raise SampleError(
            f"{where}: log_probs are given for tokens that are not trainable.",
            next_step="Leave them out; zeros are stored.",
            reason="log_probs_length",
        )
    if trainable and len(log_probs or ()) != count:
        found = "none" if log_probs is None else str(len(log_probs))
        raise SampleError(
            f"{where}: {found} log_probs for {count} trainable tokens, allowed: {count}.", reason="log_probs_length"
        )
    earlier = sample.rollout_log_probs
    if earlier is None and sample.response_length > 0:
        if not trainable:
            return None
        raise SampleError(
            f"{where}: the {sample.response_length} response tokens before have no rollout_log_probs.",
            next_step="Give them log-probabilities, or start a new sample.",
            reason="log_probs_missing",
        )
    return [*(earlier or []), *([0.0] * count if log_probs is None else log_probs)]


def _versions(sample: Sample, count: int, trainable: bool, meta_info: Mapping[str, Any]) -> dict[str, Any]:
    """A version that is no number gets no span, so that the sample is refused where spans are needed."""
    version = meta_info.get("weight_version")
    if count == 0 or not trainable:
        return {}
    new = meta_info.get("version_spans")
    if new is None:
        new = [(int(version), 0, count)] if version is not None and str(version).isdecimal() else []
    spans = list(sample.version_spans)
    for made_by, start, stop in new:
        start, stop = start + sample.response_length, stop + sample.response_length
        if spans and spans[-1][0] == made_by and spans[-1][2] == start:
            start = spans.pop()[1]
        spans.append((made_by, start, stop))
    versions = [*sample.weight_versions, *([] if version is None else [str(version)])]
    return {"version_spans": spans, "weight_versions": versions}


def _status(sample: Sample, finish_reason: Any, where: str) -> Any:
    kind = finish_reason.get("type") if isinstance(finish_reason, Mapping) else finish_reason
    if kind not in _STATUS:
        raise SampleError(f"{where}: finish reason is {kind!r}, allowed: {', '.join(_STATUS)}.", reason="status")
    return type(sample).Status(_STATUS[kind])


def _count(sample: Sample, num_sampled: int, meta_info: Mapping[str, Any]) -> None:
    speculation, cache = sample.spec_info, sample.prefix_cache_info
    speculation.completion_token_num += num_sampled
    speculation.spec_accept_token_num += int(meta_info.get("spec_accept_token_num", 0))
    speculation.spec_draft_token_num += int(meta_info.get("spec_draft_token_num", 0))
    speculation.spec_verify_ct += int(meta_info.get("spec_verify_ct", 0))
    cache.cached_tokens += int(meta_info.get("cached_tokens", 0))
    cache.total_prompt_tokens += int(meta_info.get("prompt_tokens", 0))
