"""The plug-in against vLLM's own way, value for value, before an engine serves anything.

The plug-in reaches into vLLM's classes by name. On a vLLM where they mean something else its columns would be wrong
without an error, so the same requests are sampled both ways and every number is compared. No vLLM is imported here.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vime.backends.vllm_utils.wire_columns import SampleAbilities, SampleAnswer, SampleCall
from vime.errors import EngineStartError

DIFFERS = "vime's sample route differs from vLLM"
"""How the message begins, in the log of an engine that didn't start."""
TESTED_VERSIONS = "Use a vLLM that vime is tested with (0.26 or 0.32)."

NUM_TOKENS = 6
NUM_ATTEMPTS = 3
"""A GPU may sum in another order the next time, and two tokens of equal probability then change places."""


@dataclass(frozen=True)
class StockAnswer:
    """What vLLM says itself: at each position the log-probabilities of the sampled token and the most probable ones."""

    token_ids: list[int]
    finish_reason: str | None
    listed: list[dict[int, float]]
    routes: npt.NDArray[Any] | None = None
    """[P + R - 1, L, K]"""
    spans: list[tuple[str, int, int]] | None = None
    """Label of the weights, first token, token after the last; None where vLLM has no labels."""


Stock = Callable[[list[int], dict[str, Any], str], Awaitable[StockAnswer]]
"""Prompt, fields of vLLM's `SamplingParams`, and a salt for the prefix cache."""
Sample = Callable[[SampleCall], Awaitable[SampleAnswer]]
_NUMBERS = itertools.count()


async def check_route(
    stock: Stock,
    sample: Sample,
    abilities: SampleAbilities,
    prompt: list[int],
    version: str,
    *,
    is_drafting: bool = False,
) -> None:
    """Compare tokens, log-probabilities, candidates, routes and nuclei of answers to `prompt`.

    `is_drafting` says that the engine decodes speculatively: a seed then settles no more than the first token, because
    drafts may be drawn without it, so that is the only one which is sampled.

    Raises `EngineStartError` that says what differs; `version` is that of vLLM.
    """
    for parameters in _requests(abilities, is_drafting=is_drafting):
        for _ in range(NUM_ATTEMPTS):
            difference = await _compare(stock, sample, parameters, abilities, prompt)
            if difference is None:
                break
        else:
            raise EngineStartError(
                f"{DIFFERS} {version}'s own answers: {difference} (request: {parameters}).",
                next_step=TESTED_VERSIONS,
            )


def _requests(abilities: SampleAbilities, *, is_drafting: bool) -> list[dict[str, Any]]:
    base = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
    greedy, seeded = base | {"temperature": 0.0}, base | {"temperature": 1.0, "seed": 5}
    if is_drafting:
        seeded |= {"max_tokens": 1}
    counts = sorted({0, min(4, abilities.max_candidates)})
    requests = [kind | {"logprobs": count} for kind in (greedy, seeded) for count in counts]
    if abilities.nucleus:
        requests.append(seeded | {"top_p": 0.6, "logprobs": counts[-1]})
    return requests


async def _compare(
    stock: Stock, sample: Sample, parameters: dict[str, Any], abilities: SampleAbilities, prompt: list[int]
) -> str | None:
    """What differs, None when nothing does."""
    expected = await stock(prompt, parameters, _name())
    call = SampleCall(
        request_id=_name(),
        token_ids=np.asarray(prompt, "<i4").tobytes(),
        sampling=parameters,
        num_candidates=parameters["logprobs"],
        routes_from=0 if abilities.routes else None,
        nucleus="top_p" in parameters,
        cache_salt=_name(),
    )
    answer = await sample(call)
    return (
        _compare_tokens(expected, answer)
        or _compare_candidates(expected, answer)
        or _compare_nuclei(expected, answer)
        or await _compare_routes(expected, call, answer, sample)
    )


def _compare_tokens(stock: StockAnswer, answer: SampleAnswer) -> str | None:
    tokens = np.frombuffer(answer.token_ids, "<i4").tolist()
    if tokens != stock.token_ids or answer.finish_reason != stock.finish_reason:
        return f"tokens {tokens} ({answer.finish_reason}), vLLM's {stock.token_ids} ({stock.finish_reason})"
    log_probs = np.frombuffer(answer.log_probs, "<f4")
    expected = np.asarray([row[token] for row, token in zip(stock.listed, tokens, strict=True)], "<f4")
    if not np.array_equal(log_probs, expected):
        return f"log-probabilities {log_probs.tolist()}, vLLM's {expected.tolist()}"
    spans = [(span.version, span.start, span.stop) for span in answer.spans]
    if stock.spans is not None and spans != stock.spans:
        return f"weight labels {spans}, vLLM's {stock.spans}"
    return None


def _compare_candidates(stock: StockAnswer, answer: SampleAnswer) -> str | None:
    """vLLM lists the sampled token and the most probable ones without order between equal values: every one that it
    lists must be among the columns with the same value, or be the sampled token."""
    shape = (len(stock.token_ids), answer.num_candidates)
    ids = np.frombuffer(answer.candidate_ids, "<i4").reshape(shape)
    log_probs = np.frombuffer(answer.candidate_log_probs, "<f4").reshape(shape)
    for position, listed in enumerate(stock.listed):
        found = dict(zip(ids[position].tolist(), log_probs[position].tolist(), strict=True))
        expected = {token: float(np.float32(value)) for token, value in listed.items()}
        sampled = stock.token_ids[position]
        found.setdefault(sampled, expected[sampled])
        if found != expected:
            return f"candidates {found} of output token {position}, vLLM's {expected}"
    return None


def _compare_nuclei(stock: StockAnswer, answer: SampleAnswer) -> str | None:
    if answer.nucleus is None:
        return None
    offsets = np.frombuffer(answer.nucleus.offsets, "<i8")
    ids = np.frombuffer(answer.nucleus.ids, "<i4")
    log_probs = np.frombuffer(answer.nucleus.log_probs, "<f4")
    for position, listed in enumerate(stock.listed):
        rows = slice(int(offsets[position]), int(offsets[position + 1]))
        nucleus = dict(zip(ids[rows].tolist(), log_probs[rows].tolist(), strict=True))
        kept = {token: float(np.float32(value)) for token, value in listed.items() if value > -np.inf}
        if not nucleus.items() >= kept.items():
            return f"nucleus {nucleus} of output token {position} lacks vLLM's {kept}"
        if abs(float(np.exp(log_probs[rows], dtype=np.float64).sum()) - 1.0) > 1e-4:
            return f"the probabilities in the nucleus of output token {position} don't sum to one"
    return None


async def _compare_routes(stock: StockAnswer, call: SampleCall, answer: SampleAnswer, sample: Sample) -> str | None:
    """With vLLM's routes where it returns any. Those that vime captures must be complete, and what the prefix cache
    brings of them must be what was captured. Rows after it may differ: they are summed in another order then."""
    if call.routes_from is None:
        return None
    num_rows = answer.num_prompt_tokens + len(stock.token_ids) - 1
    if answer.routes is None or answer.routes.shape[0] != num_rows:
        return f"routes of {0 if answer.routes is None else answer.routes.shape[0]} tokens, expected {num_rows}"
    if stock.routes is not None:
        same = np.array_equal(stock.routes, _route_rows(answer))
        return None if same else "routes differ from vLLM's"
    again = await sample(call)
    cached = slice(again.num_cached_tokens)
    same = again.routes is not None and np.array_equal(_route_rows(again)[cached], _route_rows(answer)[cached])
    return None if same else "routes of tokens in the prefix cache differ from those captured"


def _route_rows(answer: SampleAnswer) -> npt.NDArray[Any]:
    assert answer.routes is not None
    return np.frombuffer(answer.routes.data, answer.routes.dtype).reshape(answer.routes.shape)


def _name() -> str:
    return f"vime-self-test-{next(_NUMBERS)}"
