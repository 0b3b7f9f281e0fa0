"""The comparison of the sample route with vLLM's own answers finds every kind of difference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from vime.backends.vllm_utils.plugin.self_test import NUM_TOKENS, StockAnswer, check_route
from vime.backends.vllm_utils.wire_columns import (
    NucleusColumn,
    RouteColumn,
    SampleAbilities,
    SampleAnswer,
    SampleCall,
    Span,
)
from vime.errors import EngineStartError

ABILITIES = SampleAbilities(max_candidates=20, routes=True, nucleus=True, keeps_version=False)
PROMPT = [4, 5, 6]
TOKENS = [10 + position for position in range(NUM_TOKENS)]
REST = math.log1p(-math.exp(-0.5))
LISTED = [{token + rank: -0.5 * (rank + 1) for rank in range(4)} for token in TOKENS]
TRUNCATED = [{token: -0.5, token + 50: REST, token + 1: -math.inf, token + 2: -math.inf} for token in TOKENS]
"""With top-p, the sampled token and one other are left."""
ROUTES = np.arange((len(PROMPT) + NUM_TOKENS - 1) * 2, dtype=np.uint8).reshape(-1, 2, 1)

Change = Callable[[SampleAnswer], SampleAnswer]


async def stock(_prompt: list[int], parameters: dict[str, Any], _salt: str) -> StockAnswer:
    rows = TRUNCATED if "top_p" in parameters else LISTED
    count = parameters["max_tokens"]
    listed = [dict(list(row.items())[: max(1, parameters["logprobs"])]) for row in rows[:count]]
    return StockAnswer(TOKENS[:count], "length", listed, ROUTES[: len(PROMPT) + count - 1], [("default", 0, count)])


def right(call: SampleCall) -> SampleAnswer:
    k, count = call.num_candidates, call.sampling["max_tokens"]
    rows, routes = (TRUNCATED if call.nucleus else LISTED)[:count], ROUTES[: len(PROMPT) + count - 1]
    offsets = np.arange(0, 2 * count + 1, 2)
    nucleus_ids = np.asarray([[token, token + 50] for token in TOKENS[:count]], "<i4")
    values = np.tile(np.asarray([-0.5, REST], "<f4"), count)
    return SampleAnswer(
        num_candidates=k,
        token_ids=np.asarray(TOKENS[:count], "<i4").tobytes(),
        log_probs=np.full(count, -0.5, "<f4").tobytes(),
        candidate_ids=np.asarray([list(row)[:k] for row in rows], "<i4").tobytes(),
        candidate_log_probs=np.asarray([list(row.values())[:k] for row in rows], "<f4").tobytes(),
        finish_reason="length",
        spans=[Span("default", 0, count)],
        num_prompt_tokens=len(PROMPT),
        num_cached_tokens=2,
        routes=RouteColumn("|u1", routes.shape, routes.tobytes(), 0),
        nucleus=NucleusColumn(nucleus_ids.tobytes(), offsets.astype("<i8").tobytes(), values.tobytes())
        if call.nucleus
        else None,
    )


def replaced(name: str, at: int, value: float, dtype: str) -> Change:
    def change(answer: SampleAnswer) -> SampleAnswer:
        numbers = np.frombuffer(getattr(answer, name), dtype).copy()
        if at < len(numbers):
            numbers[at] = value
        return msgspec.structs.replace(answer, **{name: numbers.tobytes()})

    return change


def fewer_routes(answer: SampleAnswer) -> SampleAnswer:
    return msgspec.structs.replace(answer, routes=RouteColumn("|u1", (2, 2, 1), ROUTES[:2].tobytes(), 0))


def other_routes(answer: SampleAnswer) -> SampleAnswer:
    return msgspec.structs.replace(answer, routes=RouteColumn("|u1", ROUTES.shape, (ROUTES + 1).tobytes(), 0))


def without_routes(answer: SampleAnswer) -> SampleAnswer:
    return msgspec.structs.replace(answer, routes=None)


def other_nucleus(answer: SampleAnswer) -> SampleAnswer:
    if answer.nucleus is None:
        return answer
    ids = np.frombuffer(answer.nucleus.ids, "<i4") + 1
    return msgspec.structs.replace(answer, nucleus=msgspec.structs.replace(answer.nucleus, ids=ids.tobytes()))


def wider_nucleus(answer: SampleAnswer) -> SampleAnswer:
    if answer.nucleus is None:
        return answer
    ids = np.asarray([[token, token + 50, token + 60] for token in TOKENS], "<i4")
    offsets = np.arange(0, 3 * NUM_TOKENS + 1, 3).astype("<i8")
    values = np.tile(np.asarray([-0.5, REST, -1.0], "<f4"), NUM_TOKENS)
    return msgspec.structs.replace(answer, nucleus=NucleusColumn(ids.tobytes(), offsets.tobytes(), values.tobytes()))


async def test_equal_answers_pass() -> None:
    asked = []

    async def sample(call: SampleCall) -> SampleAnswer:
        asked.append(call)
        return right(call)

    await check_route(stock, sample, ABILITIES, PROMPT, "0.32")
    assert {call.num_candidates for call in asked} == {0, 4}
    assert {call.sampling["temperature"] for call in asked} == {0.0, 1.0}
    assert any(call.nucleus for call in asked)
    assert len({call.cache_salt for call in asked}) == len(asked)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced("token_ids", 2, 99, "<i4"), r"tokens \[10, 11, 99"),
        (replaced("log_probs", 1, -0.5000001, "<f4"), "log-probabilities"),
        (replaced("candidate_ids", 6, 3, "<i4"), "candidates .* of output token 1"),
        (replaced("candidate_log_probs", 6, -1.0, "<f4"), "candidates .* of output token 1"),
        (lambda answer: msgspec.structs.replace(answer, finish_reason="stop"), r"\(stop\), vLLM's .*\(length\)"),
        (lambda answer: msgspec.structs.replace(answer, spans=[Span("1", 0, 6)]), "weight labels .*vLLM's"),
        (without_routes, "routes of 0 tokens, expected 8"),
        (fewer_routes, "routes of 2 tokens, expected 8"),
        (other_routes, "routes differ from vLLM's"),
        (other_nucleus, "nucleus .* of output token 0 lacks vLLM's"),
        (wider_nucleus, "in the nucleus of output token 0 don't sum to one"),
    ],
)
async def test_a_difference_ends_the_start_and_says_what_differs(change: Change, message: str) -> None:
    async def wounded(call: SampleCall) -> SampleAnswer:
        return change(right(call))

    with pytest.raises(EngineStartError, match=rf"(?s)differs from vLLM 0\.99's own answers: .*{message}") as caught:
        await check_route(stock, wounded, ABILITIES, PROMPT, "0.99")
    assert "0.26 or 0.32" in caught.value.next_step


async def test_captured_routes_must_be_the_same_when_the_cache_brings_them() -> None:
    answers = 0

    async def own_routes_only(prompt: list[int], parameters: dict[str, Any], salt: str) -> StockAnswer:
        found = await stock(prompt, parameters, salt)
        return StockAnswer(found.token_ids, found.finish_reason, found.listed, None)

    async def forgetful(call: SampleCall) -> SampleAnswer:
        nonlocal answers
        answers += 1
        return right(call) if answers % 2 else other_routes(right(call))

    with pytest.raises(EngineStartError, match="routes of tokens in the prefix cache differ from those captured"):
        await check_route(own_routes_only, forgetful, ABILITIES, PROMPT, "0.32")


async def test_one_difference_that_does_not_come_back_is_forgiven() -> None:
    answers = 0

    async def shaky(call: SampleCall) -> SampleAnswer:
        nonlocal answers
        answers += 1
        return replaced("log_probs", 0, -0.6, "<f4")(right(call)) if answers == 1 else right(call)

    await check_route(stock, shaky, ABILITIES, PROMPT, "0.32")


def after_drafts(answer: SampleAnswer) -> SampleAnswer:
    """Another second token."""
    return replaced("token_ids", 1, 99, "<i4")(answer)


def from_the_start(answer: SampleAnswer) -> SampleAnswer:
    """Another first token."""
    return replaced("token_ids", 0, 99, "<i4")(answer)


async def test_sampled_tokens_after_drafts_may_differ_and_are_compared_without_drafts() -> None:
    async def sample(call: SampleCall) -> SampleAnswer:
        return after_drafts(right(call)) if call.sampling["temperature"] else right(call)

    await check_route(stock, sample, ABILITIES, PROMPT, "0.32", is_drafting=True)
    with pytest.raises(EngineStartError, match=r"tokens \[10, 99"):
        await check_route(stock, sample, ABILITIES, PROMPT, "0.32")


@pytest.mark.parametrize(("change", "temperature"), [(after_drafts, 0.0), (from_the_start, 1.0)])
async def test_an_engine_that_drafts_answers_greedy_requests_and_samples_first_tokens_as_vllm_does(
    change: Change, temperature: float
) -> None:
    async def wounded(call: SampleCall) -> SampleAnswer:
        return change(right(call)) if call.sampling["temperature"] == temperature else right(call)

    with pytest.raises(EngineStartError, match=r"tokens .*99"):
        await check_route(stock, wounded, ABILITIES, PROMPT, "0.32", is_drafting=True)
