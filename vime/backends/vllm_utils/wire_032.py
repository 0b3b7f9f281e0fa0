"""The routes and JSON shapes of vLLM 0.32. Another version with other shapes gets a module beside this one.

Tokens are sampled through it only where vime's plug-in, and with it the route of `wire_columns`, is missing.
"""

from __future__ import annotations

import math
import re
from typing import Any, cast

import msgspec

from vime.backends.vllm_utils.protocol import (
    START_VERSION,
    Drafts,
    EngineMetrics,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Sampling,
    VersionSpan,
)
from vime.errors import EngineError

GENERATE = "/inference/v1/generate"
NO_LOG_PROB = -9999.0
"""vLLM's stand-in for a log-probability that is NaN, minus infinity or missing."""

UPDATE_IS_OPEN = "a weight update is already active"
"""Part of vLLM's answer to opening an update twice."""

UNLABELLED = "default"
"""vLLM's label of the weights that an engine was started with."""
FINISH_REASONS = ("stop", "length", "abort")
"""How a request can end without an error."""


class _TopLogProb(msgspec.Struct):
    token_id: int
    logprob: float


class _LogProb(msgspec.Struct):
    token_id: int
    logprob: float
    top_logprobs: list[_TopLogProb] = []


class _LogProbs(msgspec.Struct):
    content: list[_LogProb] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _LogProbs | None = None
    weight_versions: list[_Span] | None = None


class _PromptLogProb(msgspec.Struct):
    logprob: float


class _Scored(msgspec.Struct):
    prompt_logprobs: list[dict[str, _PromptLogProb] | None] | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Drafts(msgspec.Struct):
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_spec_steps: int


class _Metrics(msgspec.Struct):
    speculative_decoding: _Drafts | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None
    metrics: _Metrics | None = None


def encode_generate(request: GenerateRequest) -> bytes:
    """JSON body of a generate request."""
    body: dict[str, Any] = {
        "request_id": request.request_id,
        "token_ids": request.token_ids,
        "sampling_params": sampling_parameters(request.sampling) | {"logprobs": 0},
    }
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if request.media:
        body["content_parts"] = [{"type": f"{part.kind}_url", "url": part.url} for part in request.media]
        body["return_token_ids"] = True
    return msgspec.json.encode(body)


def sampling_parameters(sampling: Sampling) -> dict[str, Any]:
    """Fields of vLLM's `SamplingParams`. Text is only decoded in the engine when stop strings need it."""
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_tokens": sampling.min_tokens,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": sampling.skip_special_tokens,
        "ignore_eos": sampling.ignore_eos,
        "detokenize": bool(sampling.stop),
    }


def encode_score(request_id: str, token_ids: list[int]) -> bytes:
    """JSON body of a request for the log-probability of each token of a prompt; one token is sampled and unused."""
    parameters = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
    return msgspec.json.encode({"request_id": request_id, "token_ids": token_ids, "sampling_params": parameters})


def encode_score_of_one(request_id: str, token_ids: list[int], token: int, temperature: float) -> bytes:
    """JSON body of a request for the log-probability of `token` after `token_ids`; what is sampled is unused.

    The token is asked for twice: the engine returns as many as are asked for, and the sampled one is the first of them.
    """
    parameters = {
        "max_tokens": 1,
        "temperature": temperature,
        "logprobs": 2,
        "logprob_token_ids": [token, token],
        "detokenize": False,
    }
    return msgspec.json.encode({"request_id": request_id, "token_ids": token_ids, "sampling_params": parameters})


def decode_score_of_one(body: bytes, request_id: str, token: int) -> float:
    """Log-probability of the token that `encode_score_of_one` asked for; `EngineError` for what can't be used."""
    where = f"request {request_id}"
    try:
        choices = msgspec.json.decode(body, type=_Answer).choices
    except msgspec.DecodeError as error:
        raise EngineError(f"{where}: the engine's answer can't be read: {error}.") from error
    rows = [row for choice in choices[:1] if choice.logprobs for row in (choice.logprobs.content or [])[:1]]
    found: dict[int, float] = {}
    for row in rows:
        found |= {row.token_id: row.logprob, **{other.token_id: other.logprob for other in row.top_logprobs}}
    value = found.get(token)
    if value is None or not NO_LOG_PROB < value <= 0.0:
        raise EngineError(
            f"{where}: the log-probability of token {token} is {'absent' if value is None else value}, allowed: finite "
            "and not above zero.",
            next_step="Serve the teacher with a vLLM that knows logprob_token_ids, or score with prompt-logprobs.",
        )
    return value


def decode_score(body: bytes, request_id: str, token_ids: list[int], start: int) -> list[float]:
    """Log-probability of each of `token_ids[start:]` after those before it; `EngineError` for what can't be used."""
    where = f"request {request_id}"
    try:
        rows = msgspec.json.decode(body, type=_Scored).prompt_logprobs or []
    except msgspec.DecodeError as error:
        raise EngineError(f"{where}: the engine's answer can't be read: {error}.") from error
    if len(rows) != len(token_ids):
        raise EngineError(f"{where}: the engine scored {len(rows)} of {len(token_ids)} tokens, allowed: all.")
    found = []
    for position in range(start, len(token_ids)):
        value = (rows[position] or {}).get(str(token_ids[position]))
        if value is None or not NO_LOG_PROB < value.logprob <= 0.0:
            said = "absent" if value is None else str(value.logprob)
            raise EngineError(
                f"{where}: the log-probability of token {position} (id {token_ids[position]}) is {said}, allowed: "
                "finite and not above zero.",
                next_step="Check that the teacher's tokenizer is that of the model that is trained.",
            )
        found.append(value.logprob)
    return found


def engine_request_id(request_id: str) -> str:
    """The name under which the engine knows a generate request, for aborting it."""
    return f"generate-tokens-{request_id}"


def parse_version(label: str) -> int:
    """Version number of an engine's label; raises `EngineError` for one that vime did not set."""
    if label == UNLABELLED:
        return START_VERSION
    if not label.isdecimal():
        raise EngineError(f"The engine reports weight version {label!r}, allowed: a number.")
    return int(label)


def decode_generate(body: bytes, request: GenerateRequest) -> GenerateResult:
    """Check and convert an answer; raises `EngineError` for anything that training could not use."""
    where = f"request {request.request_id}"
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except msgspec.DecodeError as error:
        raise EngineError(f"{where}: the engine's answer can't be read: {error}.") from error
    if len(answer.choices) != 1:
        raise EngineError(f"{where}: the engine answered with {len(answer.choices)} choices, allowed: 1.")
    choice = answer.choices[0]
    token_ids = choice.token_ids or []
    if choice.finish_reason not in FINISH_REASONS:
        allowed = ", ".join(FINISH_REASONS)
        raise EngineError(f"{where}: finish reason is {choice.finish_reason!r}, allowed: {allowed}.")
    if request.media and not answer.prompt_token_ids:
        raise EngineError(
            f"{where}: the engine doesn't say what the prompt with its media is.",
            next_step="Serve the model with vLLM 0.32 or newer.",
        )
    usage = answer.usage or _Usage()
    details = usage.prompt_tokens_details or _CachedTokens()
    return GenerateResult(
        request_id=request.request_id,
        token_ids=token_ids,
        log_probs=_log_probs(choice, token_ids, where),
        finish_reason=cast(FinishReason, choice.finish_reason),
        version_spans=check_spans(
            [VersionSpan(parse_version(span.version), span.start, span.end) for span in choice.weight_versions or []],
            len(token_ids),
            where,
        ),
        num_prompt_tokens=usage.prompt_tokens,
        num_cached_tokens=details.cached_tokens or 0,
        prompt_token_ids=answer.prompt_token_ids if request.media else None,
        drafts=_drafts(answer.metrics),
    )


def _drafts(metrics: _Metrics | None) -> Drafts | None:
    told = None if metrics is None else metrics.speculative_decoding
    return None if told is None else Drafts(told.num_draft_tokens, told.num_accepted_draft_tokens, told.num_spec_steps)


def _log_probs(choice: _Choice, token_ids: list[int], where: str) -> list[float]:
    content = (choice.logprobs.content if choice.logprobs else None) or []
    if [item.token_id for item in content] != token_ids:
        raise EngineError(f"{where}: {len(content)} log-probabilities don't belong to the {len(token_ids)} tokens.")
    for position, item in enumerate(content):
        if not math.isfinite(item.logprob) or item.logprob <= NO_LOG_PROB or item.logprob > 0.0:
            raise EngineError(
                f"{where}: log-probability of output token {position} (id {item.token_id}) is {item.logprob}, "
                "allowed: finite and not above zero.",
                next_step="The engine's weights may be damaged; publish again or restart the engine.",
            )
    return [item.logprob for item in content]


def check_spans(spans: list[VersionSpan], num_tokens: int, where: str) -> list[VersionSpan]:
    """The spans; raises `EngineError` unless they cover the tokens in order."""
    position = 0
    for span in spans:
        if span.start != position or span.stop <= span.start:
            raise EngineError(f"{where}: version span {span} does not continue at token {position}.")
        position = span.stop
    if position != num_tokens:
        raise EngineError(f"{where}: version spans cover {position} of {num_tokens} tokens.")
    return spans


def parse_metrics(text: str) -> EngineMetrics:
    """Queue lengths from the Prometheus text of an engine, summed over its cores."""

    def total(name: str) -> float:
        return sum(float(value) for value in re.findall(rf"^vllm:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))

    return EngineMetrics(
        int(total("num_requests_running")), int(total("num_requests_waiting")), total("kv_cache_usage_perc")
    )
