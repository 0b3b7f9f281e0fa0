"""Log-probabilities that an engine gives to tokens it has not sampled."""

from __future__ import annotations

import asyncio
import uuid

from vime.backends.vllm_utils import wire_032 as wire
from vime.backends.vllm_utils.engine_http import EngineHttp

SCORES_AT_ONCE = 64
"""Requests for the score of one token each that run at once, for one sample."""


async def score(http: EngineHttp, token_ids: list[int], start: int, timeout_s: float) -> list[float]:
    """Of each of `token_ids[start:]`, by one request; see `EngineClient.score`."""
    request_id = uuid.uuid4().hex
    data = wire.encode_score(request_id, token_ids)
    body = await http.call("POST", wire.GENERATE, data=data, timeout_s=timeout_s, samples=True)
    return wire.decode_score(body, request_id, token_ids, start)


async def score_each(
    http: EngineHttp, token_ids: list[int], start: int, temperature: float, timeout_s: float
) -> list[float]:
    """Of each of `token_ids[start:]`, by a request each; see `EngineClient.score_each`."""
    limit = asyncio.Semaphore(SCORES_AT_ONCE)

    async def score_one(position: int) -> float:
        request_id, token = uuid.uuid4().hex, token_ids[position]
        data = wire.encode_score_of_one(request_id, token_ids[:position], token, temperature)
        async with limit:
            body = await http.call("POST", wire.GENERATE, data=data, timeout_s=timeout_s, samples=True)
        return wire.decode_score_of_one(body, request_id, token)

    tasks = [asyncio.create_task(score_one(position)) for position in range(start, len(token_ids))]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
