"""Messages of the sample route: what can't be trained on is refused, naming request, value found and what works."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from vime.backends.vllm_utils.protocol import GenerateRequest, SampleColumns, Sampling, VersionSpan
from vime.backends.vllm_utils.wire_columns import (
    NucleusColumn,
    RouteColumn,
    SampleAnswer,
    Span,
    decode_answer,
    decode_call,
    encode_call,
)
from vime.errors import EngineError, SampleError

ALL = SampleColumns(num_candidates=2, routes=True, nucleus=True)
SAMPLING = Sampling(
    5, top_p=0.9, seed=7, min_tokens=2, stop=("end",), stop_token_ids=(9,), skip_special_tokens=True, ignore_eos=True
)
REQUEST = GenerateRequest("one", [1, 2, 3, 4], SAMPLING, "v3", ALL, routes_from=3)


def floats(*values: float) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def ids(*values: int) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def answer(**changes: Any) -> bytes:
    """Two tokens after four of the prompt, routes from row 3 on."""
    whole = SampleAnswer(
        num_candidates=2,
        token_ids=ids(7, 8),
        log_probs=floats(-0.5, -0.25),
        candidate_ids=ids(7, 9, 9, 8),
        candidate_log_probs=floats(-0.5, -1.0, -0.125, -0.25),
        finish_reason="stop",
        spans=[Span("3", 0, 1), Span("4", 1, 2)],
        num_prompt_tokens=4,
        num_cached_tokens=2,
        routes=RouteColumn("|u1", (2, 1, 2), bytes([0, 1, 2, 3]), 3),
        nucleus=NucleusColumn(ids(7, 8, 9), np.asarray([0, 1, 3], "<i8").tobytes(), floats(0.0, -0.25, -1.5)),
    )
    return msgspec.msgpack.encode(msgspec.structs.replace(whole, **changes))


def test_a_call_says_what_is_sampled_and_what_is_wanted() -> None:
    call = decode_call(encode_call(REQUEST), "application/json")
    assert np.frombuffer(call.token_ids, "<i4").tolist() == [1, 2, 3, 4]
    assert (call.num_candidates, call.routes_from, call.nucleus, call.cache_salt) == (2, 3, True, "v3")
    assert call.sampling == {
        "logprobs": 2, "max_tokens": 5, "temperature": 1.0, "top_p": 0.9, "top_k": -1, "seed": 7, "min_tokens": 2,
        "repetition_penalty": 1.0, "stop": ["end"], "stop_token_ids": [9], "skip_special_tokens": True,
        "ignore_eos": True, "detokenize": True,
    }  # fmt: skip
    plain = decode_call(encode_call(GenerateRequest("two", [1], Sampling(5))), "application/json")
    assert (plain.routes_from, plain.sampling["detokenize"]) == (None, False)
    assert decode_call(msgspec.msgpack.encode(call), "application/msgpack") == call
    with pytest.raises(ValueError, match="Object missing required field"):
        decode_call(b"{}", "application/json")


def test_a_whole_answer_is_read() -> None:
    result = decode_answer(answer(), REQUEST)
    assert (result.token_ids, result.log_probs, result.finish_reason) == ([7, 8], [-0.5, -0.25], "stop")
    assert result.version_spans == [VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)]
    assert (result.num_prompt_tokens, result.num_cached_tokens) == (4, 2)
    assert result.candidates is not None
    assert result.candidates.ids.tolist() == [[7, 9], [9, 8]]
    assert result.candidates.log_probs.tolist() == [[-0.5, -1.0], [-0.125, -0.25]]
    assert result.routed_experts is not None
    assert (result.routed_experts.dtype, result.routed_experts.tolist()) == ("uint8", [[[0, 1]], [[2, 3]]])
    assert result.nucleus is not None
    assert (result.nucleus.ids.tolist(), result.nucleus.offsets.tolist()) == ([7, 8, 9], [0, 1, 3])


def test_an_abort_before_the_first_token_has_empty_columns() -> None:
    empty = answer(
        token_ids=b"", log_probs=b"", candidate_ids=b"", candidate_log_probs=b"", finish_reason="abort", spans=[],
        routes=None, nucleus=NucleusColumn(b"", bytes(8), b""),
    )  # fmt: skip
    result = decode_answer(empty, REQUEST)
    assert (result.token_ids, result.finish_reason, result.routed_experts) == ([], "abort", None)
    assert result.candidates is not None
    assert result.candidates.ids.shape == (0, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_probs": floats(-0.5)}, "1 log-probabilities don't belong to the 2 tokens"),
        ({"log_probs": floats(-0.5, float("nan"))}, "of output token 1 is nan, allowed: finite and not above zero"),
        ({"log_probs": floats(0.25, -0.5)}, "of output token 0 is 0.25"),
        ({"log_probs": floats(-0.5, float("-inf"))}, "of output token 1 is -inf"),
        ({"num_candidates": 1}, "1 candidates came, 2 were asked for"),
        ({"candidate_ids": ids(7, 9)}, "columns have wrong lengths"),
        ({"token_ids": b"abc"}, "columns have wrong lengths"),
        ({"nucleus": None}, "nucleus has 0 ids and 0 log-probabilities of 0 tokens"),
        ({"nucleus": NucleusColumn(ids(7), np.asarray([0, 1, 3], "<i8").tobytes(), floats(0.0))}, "nucleus has 1 ids"),
        ({"finish_reason": "error"}, "finish reason is 'error', allowed: stop, length, abort"),
        ({"spans": [Span("3", 0, 1)]}, "version spans cover 1 of 2 tokens"),
        ({"spans": [Span("v3", 0, 2)]}, "weight version 'v3', allowed: a number"),
    ],
)
def test_columns_that_training_could_not_use_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        decode_answer(answer(**changes), REQUEST)
    assert changes.get("spans") == [Span("v3", 0, 2)] or "request one" in str(caught.value)


@pytest.mark.parametrize(
    ("routes", "reason", "message"),
    [
        (
            None,
            "routes_missing",
            r"routes of 0 tokens came, allowed: 2 \(4 prompt and 2 output tokens, from row 3 on\)",
        ),
        (RouteColumn("|u1", (1, 1, 2), b"ab", 3), "routes_rows", "routes of 1 tokens came, allowed: 2"),
    ],
)
def test_an_answer_without_all_routes_is_a_sample_that_can_not_be_trained(
    routes: RouteColumn | None, reason: str, message: str
) -> None:
    with pytest.raises(SampleError, match=message) as caught:
        decode_answer(answer(routes=routes), REQUEST)
    assert caught.value.reason == reason


def test_an_answer_that_is_no_message_is_refused() -> None:
    with pytest.raises(EngineError, match="request one: the engine's answer can't be read"):
        decode_answer(b"{}", REQUEST)
