"""The stream of vime's plug-in: a sample's tokens in pieces, while the engine works on it. Numpy and msgspec only.

`POST STREAM` takes a `SampleCall` without columns and answers with frames: four bytes of length, little-endian, then
the msgpack of a `StreamPiece`. The last piece has a finish reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np

from vime.backends.vllm_utils.protocol import FinishReason, GeneratedPiece, GenerateRequest, VersionSpan
from vime.backends.vllm_utils.wire_032 import FINISH_REASONS, check_spans, parse_version
from vime.backends.vllm_utils.wire_columns import DraftCounts, Span, check_log_probs
from vime.errors import EngineError

STREAM = "/inference/v1/sample_stream"
"""Beside the sample route."""

LENGTH_BYTES = 4


class StreamPiece(msgspec.Struct, frozen=True):
    """The next n sampled tokens; `spans` count from the first of them."""

    token_ids: bytes = b""
    """int32 [n]"""
    log_probs: bytes = b""
    """float32 [n]"""
    spans: list[Span] = []
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    drafts: DraftCounts | None = None
    """Of the whole request, with its last piece."""


def encode_frame(piece: StreamPiece) -> bytes:
    """A piece with its length."""
    body = msgspec.msgpack.encode(piece)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def stream_piece(
    tokens: Sequence[int],
    log_probs: Sequence[float],
    labels: Sequence[str],
    *,
    finish_reason: str | None,
    num_prompt_tokens: int,
    num_cached_tokens: int,
    drafts: DraftCounts | None = None,
) -> StreamPiece:
    """A piece of tokens, each with the label of the weights that made it."""
    spans: list[Span] = []
    for position, label in enumerate(labels):
        start = spans.pop().start if spans and spans[-1].version == label else position
        spans.append(Span(label, start, position + 1))
    return StreamPiece(
        np.asarray(tokens, "<i4").tobytes(),
        np.asarray(log_probs, "<f4").tobytes(),
        spans,
        finish_reason,
        num_prompt_tokens,
        num_cached_tokens,
        drafts,
    )


def decode_piece(body: bytes, request: GenerateRequest) -> GeneratedPiece:
    """Check and convert a piece; raises `EngineError` for one that training could not use."""
    where = f"request {request.request_id}"
    try:
        piece = msgspec.msgpack.decode(body, type=StreamPiece)
        token_ids = np.frombuffer(piece.token_ids, "<i4")
        log_probs = np.frombuffer(piece.log_probs, "<f4")
    except (msgspec.MsgspecError, ValueError) as error:
        raise EngineError(f"{where}: the engine's stream can't be read: {error}.") from error
    if piece.finish_reason not in (None, *FINISH_REASONS):
        allowed = ", ".join(FINISH_REASONS)
        raise EngineError(f"{where}: finish reason is {piece.finish_reason!r}, allowed: {allowed}.")
    check_log_probs(log_probs, len(token_ids), where)
    spans = [VersionSpan(parse_version(span.version), span.start, span.stop) for span in piece.spans]
    return GeneratedPiece(
        token_ids.tolist(),
        log_probs.tolist(),
        check_spans(spans, len(token_ids), where),
        cast("FinishReason | None", piece.finish_reason),
        piece.num_prompt_tokens,
        piece.num_cached_tokens,
        None if piece.drafts is None else piece.drafts.drafts(),
    )
