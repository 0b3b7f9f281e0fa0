"""An engine's answer in the form in which a sample takes it."""

from __future__ import annotations

from typing import Any

from vime.backends.vllm_utils.protocol import Drafts, GeneratedPiece, GenerateRequest, GenerateResult


def answer_info(request: GenerateRequest, result: GenerateResult) -> dict[str, Any]:
    """`meta_info` of `Sample.append_response_tokens`: everything that the engine said besides tokens, log-probabilities
    and text. The keys are listed in `vime.utils.append_tokens`."""
    spans = result.version_spans
    info: dict[str, Any] = {
        "finish_reason": {"type": result.finish_reason},
        "version_spans": [(span.version, span.start, span.stop) for span in spans],
        "cached_tokens": result.num_cached_tokens,
        "prompt_tokens": result.num_prompt_tokens,
        **_drafts(result.drafts),
    }
    if spans:
        info["weight_version"] = str(spans[-1].version)
    if result.candidates is not None:
        info["score_centering_topk"] = (result.candidates.ids, result.candidates.log_probs)
    if result.nucleus is not None:
        info["score_centering_top_p"] = (result.nucleus.ids, result.nucleus.offsets, result.nucleus.log_probs)
    if result.routed_experts is not None:
        info["routed_experts"] = result.routed_experts
        info["routed_experts_prompt_start"] = request.routes_from
    return info


def piece_info(piece: GeneratedPiece, *, is_first: bool) -> dict[str, Any]:
    """The same of a piece of a stream; what holds for the whole request counts with its first."""
    spans = piece.version_spans
    info: dict[str, Any] = {"version_spans": [(span.version, span.start, span.stop) for span in spans]}
    info |= _drafts(piece.drafts)
    if piece.finish_reason is not None:
        info["finish_reason"] = {"type": piece.finish_reason}
    if spans:
        info["weight_version"] = str(spans[-1].version)
    if is_first:
        info |= {"cached_tokens": piece.num_cached_tokens, "prompt_tokens": piece.num_prompt_tokens}
    return info


def _drafts(drafts: Drafts | None) -> dict[str, int]:
    if drafts is None:
        return {}
    return {
        "spec_draft_token_num": drafts.num_drafted,
        "spec_accept_token_num": drafts.num_accepted,
        "spec_verify_ct": drafts.num_steps,
    }
