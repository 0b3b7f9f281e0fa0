"""Messages of the sample route: what can't be trained on is refused, naming request, value found and what works."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from vime.backends.vllm_utils.answer_info import answer_info, piece_info
from vime.backends.vllm_utils.plugin.draft_counts import draft_counts
from vime.backends.vllm_utils.protocol import Drafts, GenerateRequest, SampleColumns, Sampling, VersionSpan
from vime.backends.vllm_utils.wire_032 import decode_generate
from vime.backends.vllm_utils.wire_columns import (
    DraftCounts,
    NucleusColumn,
    RouteColumn,
    SampleAnswer,
    Span,
    decode_answer,
    decode_call,
    encode_call,
)
from vime.backends.vllm_utils.wire_stream import decode_piece, stream_piece
from vime.errors import EngineError, SampleError
from vime.utils.types import Sample

ALL = SampleColumns(num_candidates=2, routes=True, nucleus=True)
SAMPLING = Sampling(
    5, top_p=0.9, seed=7, min_tokens=2, stop=("end",), stop_token_ids=(9,), skip_special_tokens=True, ignore_eos=True
)
REQUEST = GenerateRequest("one", [1, 2, 3, 4], SAMPLING, "v3", ALL, routes_from=3)
PLAIN = GenerateRequest("one", [1, 2, 3, 4], SAMPLING)


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


def test_what_an_engine_drafted_is_counted_with_the_sample() -> None:
    sample = Sample()
    for drafts in (DraftCounts(6, 3, 2), None, DraftCounts(4, 1, 1)):
        result = decode_answer(answer(drafts=drafts, num_candidates=0, routes=None, nucleus=None), PLAIN)
        sample.append_response_tokens(None, result.token_ids, result.log_probs, meta_info=answer_info(PLAIN, result))
    assert sample.spec_info == Sample.SpecInfo(4, 10, 3, 6)
    assert (sample.spec_info.accept_rate, sample.spec_info.accept_length) == (0.4, 2.0)


def test_what_an_engine_drafted_comes_with_the_last_piece_of_a_stream() -> None:
    sample = Sample()
    for reason, drafts in ((None, None), ("stop", DraftCounts(6, 3, 2))):
        sent = stream_piece(
            [7], [-0.5], ["3"], finish_reason=reason, num_prompt_tokens=4, num_cached_tokens=0, drafts=drafts
        )
        piece = decode_piece(msgspec.msgpack.encode(sent), PLAIN)
        info = piece_info(piece, is_first=False)
        sample.append_response_tokens(None, piece.token_ids, piece.log_probs, meta_info=info)
    assert sample.spec_info == Sample.SpecInfo(3, 6, 2, 2)


def test_what_an_engine_drafted_is_read_from_its_own_route_too() -> None:
    told = {
        "choices": [{"token_ids": [7], "finish_reason": "stop",
                     "logprobs": {"content": [{"token_id": 7, "logprob": -1}]},
                     "weight_versions": [{"version": "3", "start": 0, "end": 1}]}],
        "metrics": {"speculative_decoding": {"num_draft_tokens": 6, "num_accepted_draft_tokens": 3,
                                             "num_spec_steps": 2, "num_spec_tokens": 3}},
    }  # fmt: skip
    assert decode_generate(msgspec.json.encode(told), PLAIN).drafts == Drafts(6, 3, 2)
    assert decode_generate(msgspec.json.encode(told | {"metrics": None}), PLAIN).drafts is None


def test_drafts_are_summed_over_the_steps_that_verified_them() -> None:
    """Of three steps one accepted nothing, one two, and one three of at most three."""
    told = SimpleNamespace(spec_decode_metrics=SimpleNamespace(histogram=[1, 0, 1, 1], num_draft_tokens=8))
    assert draft_counts(told) == DraftCounts(8, 5, 3)
    assert draft_counts(SimpleNamespace(spec_decode_metrics=None)) is None
    assert draft_counts(SimpleNamespace()) is None


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
