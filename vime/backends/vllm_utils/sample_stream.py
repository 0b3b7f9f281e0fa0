"""The client's side of streamed samples, for engines and routers alike."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping

from vime.backends.vllm_utils.engine_http import EngineHttp
from vime.backends.vllm_utils.protocol import GeneratedPiece, GenerateRequest
from vime.backends.vllm_utils.wire_columns import encode_call
from vime.backends.vllm_utils.wire_stream import LENGTH_BYTES, STREAM, decode_piece
from vime.errors import EngineError, EngineUnavailable


async def sample_stream(
    http: EngineHttp, request: GenerateRequest, headers: Mapping[str, str], timeout_s: float
) -> AsyncGenerator[GeneratedPiece]:
    """The pieces of a request; the last has a finish reason. Closing it early ends the request in the engine.

    Raises `EngineUnavailable` when the answer breaks off, `EngineError` for columns, or what the engine refuses.
    """
    if not request.columns.is_empty:
        raise EngineError(f"request {request.request_id}: a stream has no {request.columns}.")
    frames = http.frames(STREAM, encode_call(request), length_bytes=LENGTH_BYTES, headers=headers, timeout_s=timeout_s)
    async with contextlib.aclosing(frames):
        async for frame in frames:
            piece = decode_piece(frame, request)
            yield piece
            if piece.finish_reason is not None:
                return
    raise EngineUnavailable(
        f"request {request.request_id}: the stream of {http.address} broke off.", next_step="See the engine's log."
    )
