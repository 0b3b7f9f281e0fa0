"""The sample route of vime's plug-in: msgpack out, one array of bytes a column. Numpy and msgspec only.

`POST SAMPLE` takes a `SampleCall`, as msgpack or as JSON with arrays in base64, and answers with the msgpack of a
`SampleAnswer`; `GET SAMPLE` answers with the JSON of `SampleAbilities`. Arrays are little-endian.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from vime.backends.vllm_utils.protocol import (
    Candidates,
    Drafts,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Nucleus,
    VersionSpan,
)
from vime.backends.vllm_utils.wire_032 import FINISH_REASONS, check_spans, parse_version, sampling_parameters
from vime.errors import EngineError, SampleError

SAMPLE = "/inference/v1/sample"
"""Under a path that vLLM's API key guards, and that a router forwards."""

VERSION = "/inference/v1/weight_label"
"""GET and POST of a `WeightLabel`, where `SampleAbilities.keeps_version` says so. Set it while the engine is paused."""

MSGPACK = "application/msgpack"

CAPTURE_ENV = "VIME_ENGINE_CAPTURES"
"""Set by the launcher in an engine's environment: `routes`, `nucleus` or both, which vime's worker has to capture."""


class SampleCall(msgspec.Struct, frozen=True):
    """A request. `sampling` are fields of vLLM's `SamplingParams`."""

    request_id: str
    token_ids: bytes
    """int32 [P]"""
    sampling: dict[str, Any]
    num_candidates: int = 0
    routes_from: int | None = None
    nucleus: bool = False
    cache_salt: str | None = None


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Output tokens `[start, stop)` were sampled from weights labelled `version`."""

    version: str
    start: int
    stop: int


class RouteColumn(msgspec.Struct, frozen=True):
    """Experts [rows, L, K] of all tokens but the last, from row `start` on."""

    dtype: str
    shape: tuple[int, int, int]
    data: memoryview
    start: int


class NucleusColumn(msgspec.Struct, frozen=True):
    """int32 [N], int64 [n + 1] and float32 [N]."""

    ids: bytes
    offsets: bytes
    log_probs: bytes


class DraftCounts(msgspec.Struct, frozen=True, array_like=True):
    """Speculative decoding of one request; see `Drafts`."""

    num_drafted: int
    num_accepted: int
    num_steps: int

    def drafts(self) -> Drafts:
        return Drafts(self.num_drafted, self.num_accepted, self.num_steps)


class SampleAnswer(msgspec.Struct, frozen=True):
    """n sampled tokens; `candidate_*` are [n, k], most probable first. What is large is read without a copy."""

    num_candidates: int
    token_ids: bytes
    log_probs: bytes
    candidate_ids: memoryview
    candidate_log_probs: memoryview
    finish_reason: str | None
    spans: list[Span]
    num_prompt_tokens: int
    num_cached_tokens: int
    routes: RouteColumn | None = None
    nucleus: NucleusColumn | None = None
    drafts: DraftCounts | None = None


class SampleAbilities(msgspec.Struct, frozen=True):
    """What the route of a running engine can return."""

    max_candidates: int
    routes: bool
    nucleus: bool
    keeps_version: bool
    """The label of the weights is set and asked for by the plug-in's route, because this vLLM has none."""


class WeightLabel(msgspec.Struct, frozen=True):
    """JSON of the route `VERSION`."""

    version: str


def encode_call(request: GenerateRequest) -> bytes:
    """Body of a request: JSON, because vllm-router forwards no other."""
    wanted = request.columns
    return msgspec.json.encode(
        SampleCall(
            request_id=request.request_id,
            token_ids=np.asarray(request.token_ids, "<i4").tobytes(),
            sampling=sampling_parameters(request.sampling) | {"logprobs": wanted.num_candidates},
            num_candidates=wanted.num_candidates,
            routes_from=request.routes_from if wanted.routes else None,
            nucleus=wanted.nucleus,
            cache_salt=request.cache_salt,
        )
    )


def decode_call(body: bytes, content_type: str) -> SampleCall:
    """A request of either form. Raises `ValueError` for anything else."""
    decode = msgspec.msgpack.decode if content_type.startswith(MSGPACK) else msgspec.json.decode
    return decode(body, type=SampleCall)


def decode_answer(body: bytes, request: GenerateRequest) -> GenerateResult:
    """Check and convert an answer.

    Raises `EngineError` for anything that training could not use, and `SampleError` where it lacks routes alone, which
    engines lose for single requests.
    """
    where = f"request {request.request_id}"
    try:
        answer = msgspec.msgpack.decode(body, type=SampleAnswer)
    except msgspec.MsgspecError as error:
        raise EngineError(f"{where}: the engine's answer can't be read: {error}.") from error
    if answer.finish_reason not in FINISH_REASONS:
        allowed = ", ".join(FINISH_REASONS)
        raise EngineError(f"{where}: finish reason is {answer.finish_reason!r}, allowed: {allowed}.")
    try:
        return _result(answer, request, where)
    except ValueError as error:  # bytes that are no whole array
        raise EngineError(f"{where}: the engine's columns have wrong lengths: {error}.") from error


def _result(answer: SampleAnswer, request: GenerateRequest, where: str) -> GenerateResult:
    token_ids = np.frombuffer(answer.token_ids, "<i4")
    num_tokens, width = len(token_ids), answer.num_candidates
    log_probs = np.frombuffer(answer.log_probs, "<f4")
    check_log_probs(log_probs, num_tokens, where)
    if width != request.columns.num_candidates:
        raise EngineError(f"{where}: {width} candidates came, {request.columns.num_candidates} were asked for.")
    return GenerateResult(
        request_id=request.request_id,
        token_ids=token_ids.tolist(),
        log_probs=log_probs.tolist(),
        finish_reason=cast(FinishReason, answer.finish_reason),
        version_spans=check_spans(
            [VersionSpan(parse_version(span.version), span.start, span.stop) for span in answer.spans],
            num_tokens,
            where,
        ),
        num_prompt_tokens=answer.num_prompt_tokens,
        num_cached_tokens=answer.num_cached_tokens,
        candidates=_candidates(answer, num_tokens),
        routed_experts=_routes(answer, request, num_tokens, where),
        nucleus=_nucleus(answer, request, num_tokens, where),
        drafts=None if answer.drafts is None else answer.drafts.drafts(),
    )


def check_log_probs(log_probs: npt.NDArray[np.float32], num_tokens: int, where: str) -> None:
    """Raise `EngineError` unless there is one finite number, zero or less, for each token."""
    if len(log_probs) != num_tokens:
        raise EngineError(f"{where}: {len(log_probs)} log-probabilities don't belong to the {num_tokens} tokens.")
    bad = ~(np.isfinite(log_probs) & (log_probs <= 0.0))
    if bad.any():
        position = int(np.argmax(bad))
        raise EngineError(
            f"{where}: log-probability of output token {position} is {log_probs[position]}, "
            "allowed: finite and not above zero.",
            next_step="The engine's weights may be damaged; publish again or restart the engine.",
        )


def _candidates(answer: SampleAnswer, num_tokens: int) -> Candidates | None:
    if not answer.num_candidates:
        return None
    shape = (num_tokens, answer.num_candidates)
    return Candidates(
        np.frombuffer(answer.candidate_ids, "<i4").reshape(shape),
        np.frombuffer(answer.candidate_log_probs, "<f4").reshape(shape),
    )


def _routes(
    answer: SampleAnswer, request: GenerateRequest, num_tokens: int, where: str
) -> npt.NDArray[np.integer[Any]] | None:
    if not request.columns.routes:
        return None
    expected = max(0, answer.num_prompt_tokens + num_tokens - 1 - request.routes_from) if num_tokens else 0
    column = answer.routes
    found = 0 if column is None else column.shape[0]
    if found != expected:
        raise SampleError(
            f"{where}: routes of {found} tokens came, allowed: {expected} "
            f"({answer.num_prompt_tokens} prompt and {num_tokens} output tokens, from row {request.routes_from} on).",
            next_step="Check that the engine was started to return routes; its log says what it captures.",
            reason="routes_rows" if found else "routes_missing",
        )
    if column is None:
        return None
    return np.frombuffer(column.data, column.dtype).reshape(column.shape)


def _nucleus(answer: SampleAnswer, request: GenerateRequest, num_tokens: int, where: str) -> Nucleus | None:
    if not request.columns.nucleus:
        return None
    column = answer.nucleus or NucleusColumn(b"", bytes(8), b"")
    offsets = np.frombuffer(column.offsets, "<i8")
    ids, log_probs = np.frombuffer(column.ids, "<i4"), np.frombuffer(column.log_probs, "<f4")
    if len(offsets) != num_tokens + 1 or not len(ids) == len(log_probs) == offsets[-1]:
        raise EngineError(
            f"{where}: the nucleus has {len(ids)} ids and {len(log_probs)} log-probabilities of {len(offsets) - 1} "
            f"tokens, allowed: equally many, of {num_tokens} tokens."
        )
    return Nucleus(ids, offsets, log_probs)
