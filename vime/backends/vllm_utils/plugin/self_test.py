"""The plug-in against vLLM's own way, value for value, before an engine serves anything.

The plug-in reaches into vLLM's classes by name. On a vLLM where they mean something else its columns would be wrong
without an error, so the same requests are sampled both ways and every number is compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from vime.backends.vllm_utils.plugin.sample_route import last_output
from vime.backends.vllm_utils.wire_columns import SampleAbilities, SampleAnswer, SampleCall
from vime.errors import EngineStartError

NUM_TOKENS = 6
NUM_ATTEMPTS = 3
"""A GPU may sum in another order the next time, and two tokens of equal probability then change places."""

Sample = Callable[[SampleCall], Awaitable[SampleAnswer]]
_NUMBERS = itertools.count()


async def check_route(engine: Any, sample: Sample, abilities: SampleAbilities, version: str) -> None:
    """Compare tokens, log-probabilities, candidates, routes and nuclei; `engine` is vLLM's `AsyncLLM`.

    Raises `EngineStartError` that says what differs.
    """
    for parameters in _requests(abilities):
        for _ in range(NUM_ATTEMPTS):
            difference = await _compare(engine, sample, parameters, abilities)
            if difference is None:
                break
        else:
            raise EngineStartError(
                f"vime's sample route differs from vLLM {version}'s own answers: {difference} (request: {parameters}).",
                next_step="Use a vLLM that vime is tested with (0.26 or 0.32).",
            )


def _requests(abilities: SampleAbilities) -> list[dict[str, Any]]:
    base = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
    greedy, seeded = base | {"temperature": 0.0}, base | {"temperature": 1.0, "seed": 5}
    counts = sorted({0, min(4, abilities.max_candidates)})
    requests = [kind | {"logprobs": count} for kind in (greedy, seeded) for count in counts]
    if abilities.nucleus:
        requests.append(seeded | {"top_p": 0.6, "logprobs": counts[-1]})
    return requests


async def _compare(engine: Any, sample: Sample, parameters: dict[str, Any], abilities: SampleAbilities) -> str | None:
    """What differs, None when nothing does."""
    prompt = _prompt(engine)
    stock = await _stock(engine, prompt, parameters)
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
        _compare_tokens(stock, answer)
        or _compare_candidates(stock, answer)
        or _compare_nuclei(stock, answer)
        or await _compare_routes(stock, call, answer, sample)
    )


async def _stock(engine: Any, prompt: list[int], parameters: dict[str, Any]) -> Any:
    wanted = SamplingParams(**parameters)
    wanted.output_kind = RequestOutputKind.FINAL_ONLY
    result = await last_output(engine.generate(tokens_input(prompt, cache_salt=_name()), wanted, _name()))
    return result.outputs[0]


def _compare_tokens(stock: Any, answer: SampleAnswer) -> str | None:
    tokens = np.frombuffer(answer.token_ids, "<i4").tolist()
    if tokens != list(stock.token_ids) or answer.finish_reason != stock.finish_reason:
        return f"tokens {tokens} ({answer.finish_reason}), vLLM's {list(stock.token_ids)} ({stock.finish_reason})"
    log_probs = np.frombuffer(answer.log_probs, "<f4")
    expected = np.asarray([row[token].logprob for row, token in zip(stock.logprobs, tokens, strict=True)], "<f4")
    if not np.array_equal(log_probs, expected):
        return f"log-probabilities {log_probs.tolist()}, vLLM's {expected.tolist()}"
    return None


def _compare_candidates(stock: Any, answer: SampleAnswer) -> str | None:
    """vLLM lists the sampled token and the most probable ones without order between equal values: every one that it
    lists must be among the columns with the same value, or be the sampled token."""
    shape = (len(stock.token_ids), answer.num_candidates)
    ids = np.frombuffer(answer.candidate_ids, "<i4").reshape(shape)
    log_probs = np.frombuffer(answer.candidate_log_probs, "<f4").reshape(shape)
    for position, listed in enumerate(stock.logprobs):
        found = dict(zip(ids[position].tolist(), log_probs[position].tolist(), strict=True))
        expected = {token: float(np.float32(value.logprob)) for token, value in listed.items()}
        sampled = int(stock.token_ids[position])
        found.setdefault(sampled, expected[sampled])
        if found != expected:
            return f"candidates {found} of output token {position}, vLLM's {expected}"
    return None


def _compare_nuclei(stock: Any, answer: SampleAnswer) -> str | None:
    if answer.nucleus is None:
        return None
    offsets = np.frombuffer(answer.nucleus.offsets, "<i8")
    ids = np.frombuffer(answer.nucleus.ids, "<i4")
    log_probs = np.frombuffer(answer.nucleus.log_probs, "<f4")
    for position, listed in enumerate(stock.logprobs):
        rows = slice(int(offsets[position]), int(offsets[position + 1]))
        nucleus = dict(zip(ids[rows].tolist(), log_probs[rows].tolist(), strict=True))
        expected = {token: float(np.float32(value.logprob)) for token, value in listed.items()}
        kept = {token: value for token, value in expected.items() if value > -np.inf}
        if not nucleus.items() >= kept.items():
            return f"nucleus {nucleus} of output token {position} lacks vLLM's {kept}"
        if abs(float(np.exp(log_probs[rows], dtype=np.float64).sum()) - 1.0) > 1e-4:
            return f"the probabilities in the nucleus of output token {position} don't sum to one"
    return None


async def _compare_routes(stock: Any, call: SampleCall, answer: SampleAnswer, sample: Sample) -> str | None:
    """With vLLM's routes where it returns any. Those that vime captures are compared with themselves, computed once
    more and found in the prefix cache: they must be complete and repeat."""
    if call.routes_from is None:
        return None
    num_rows = answer.num_prompt_tokens + len(stock.token_ids) - 1
    if answer.routes is None or answer.routes.shape[0] != num_rows:
        return f"routes of {0 if answer.routes is None else answer.routes.shape[0]} tokens, expected {num_rows}"
    if stock.routed_experts is not None:
        same = np.array_equal(stock.routed_experts, _route_rows(answer))
        return None if same else "routes differ from vLLM's"
    again = await sample(call)
    same = again.routes is not None and np.array_equal(_route_rows(again), _route_rows(answer))
    return None if same else "routes of the same request differ the second time"


def _route_rows(answer: SampleAnswer) -> Any:
    assert answer.routes is not None
    return np.frombuffer(answer.routes.data, answer.routes.dtype).reshape(answer.routes.shape)


def _prompt(engine: Any) -> list[int]:
    """Longer than a block of the prefix cache, where the model takes as much."""
    config = engine.vllm_config
    size = config.model_config.get_vocab_size()
    length = max(2, min(config.cache_config.block_size + 2, config.model_config.max_model_len - NUM_TOKENS - 1))
    return [3 + 7 * position % max(1, min(size, 1000) - 3) for position in range(length)]


def _name() -> str:
    return f"vime-self-test-{next(_NUMBERS)}"
