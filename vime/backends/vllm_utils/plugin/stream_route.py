"""The stream in vLLM's API server; see `vime.backends.vllm_utils.wire_stream` for its frames."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from vime.backends.vllm_utils.plugin.columns import ColumnRequest
from vime.backends.vllm_utils.plugin.draft_counts import draft_counts
from vime.backends.vllm_utils.plugin.request_columns import ReceivedColumns
from vime.backends.vllm_utils.plugin.sample_route import left, refusal, request_parameters
from vime.backends.vllm_utils.wire_032 import engine_request_id
from vime.backends.vllm_utils.wire_columns import SampleCall, decode_call
from vime.backends.vllm_utils.wire_stream import StreamPiece, encode_frame, stream_piece

ROWS_PER_PIECE = 16
"""Tokens of a piece, but for its request's first and last."""
_SPREAD = 5
"""First pieces are shorter by multiples of it, so that streams which run together don't all send in the same step."""


class StreamRoute:
    """Serves streams of one engine."""

    def __init__(self, engine: Any) -> None:
        """`engine` is vLLM's `AsyncLLM`."""
        self._engine = engine
        self._numbers = itertools.count()

    async def serve(self, request: Request) -> Response:
        """Answer a POST; a client that leaves ends its request in the engine."""
        try:
            call = decode_call(await request.body(), request.headers.get("content-type", ""))
            if call.num_candidates or call.nucleus or call.routes_from is not None:
                raise ValueError("A stream has no columns; ask the sample route for them.")
        except ValueError as error:
            return refusal(error)
        pieces = self.pieces(call)
        beginning = asyncio.create_task(anext(pieces))
        leaving = asyncio.create_task(left(request))
        try:
            await asyncio.wait((beginning, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not beginning.done():
                return Response(status_code=499)
            # What vLLM doesn't take it refuses here, before there is a status.
            return StreamingResponse(_frames(beginning.result(), pieces), media_type="application/octet-stream")
        except ValueError as error:
            return refusal(error)
        finally:
            leaving.cancel()
            beginning.cancel()

    async def pieces(self, call: SampleCall) -> AsyncGenerator[StreamPiece]:
        """Sample as asked, at least one piece. Closing it aborts the request.

        Raises `ValueError` for what this engine can't do, or vLLM's own error, which its server answers with.
        """
        rows_per_piece = 1 if call.sampling.get("stop") else ROWS_PER_PIECE
        due = 1 + next(self._numbers) * _SPREAD % rows_per_piece
        parameters = request_parameters(call, ColumnRequest())
        parameters.output_kind = RequestOutputKind.CUMULATIVE
        prompt = tokens_input(np.frombuffer(call.token_ids, "<i4").tolist(), cache_salt=call.cache_salt)
        sent = 0
        async for result in self._engine.generate(prompt, parameters, engine_request_id(call.request_id)):
            (output,) = result.outputs
            received: ReceivedColumns = output.logprobs
            stop = len(output.token_ids)  # a stop text may have cut tokens of the last step off
            if received.num_rows < stop:
                lost = stop - received.num_rows
                raise RuntimeError(f"Request {call.request_id}: {lost} sampled tokens lack rows.")
            if stop - sent >= due or output.finish_reason:
                tokens, log_probs, labels = received.piece(sent, stop)
                yield stream_piece(
                    tokens,
                    log_probs,
                    labels,
                    finish_reason=output.finish_reason,
                    num_prompt_tokens=len(result.prompt_token_ids),
                    num_cached_tokens=result.num_cached_tokens or 0,
                    drafts=draft_counts(output),
                )
                sent, due = stop, rows_per_piece


async def _frames(first: StreamPiece, others: AsyncGenerator[StreamPiece]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(others):
        yield encode_frame(first)
        async for piece in others:
            yield encode_frame(piece)
