"""Requests with media, by vLLM's own route: vime's sample route takes token ids alone."""

from __future__ import annotations

from collections.abc import Mapping

from vime.backends.vllm_utils import wire_032 as wire
from vime.backends.vllm_utils.engine_http import EngineHttp
from vime.backends.vllm_utils.protocol import GenerateRequest, GenerateResult
from vime.errors import EngineError


async def generate_with_media(
    http: EngineHttp, request: GenerateRequest, *, timeout_s: float, headers: Mapping[str, str] | None = None
) -> GenerateResult:
    """Sample after a prompt with media. Raises `EngineError`, also for columns, which don't come back this way."""
    if not request.columns.is_empty:
        raise EngineError(
            f"Engine {http.address} returns no {request.columns} of prompts with media.",
            next_step="Leave out score centering, --rollout-top-p and --use-rollout-routing-replay.",
        )
    body = await http.call(
        "POST",
        wire.GENERATE,
        data=wire.encode_generate(request),
        headers=headers,
        timeout_s=timeout_s,
        samples=True,
    )
    return wire.decode_generate(body, request)
