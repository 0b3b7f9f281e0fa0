"""What an engine says of a prompt's tokens, and what of it can't be used."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vime.backends.vllm_utils import wire_032
from vime.errors import EngineError

TOKENS = [7, 8, 9]


def answer(*rows: Any) -> bytes:
    return json.dumps({"choices": [], "prompt_logprobs": list(rows)}).encode()


def test_only_the_asked_for_tokens_are_read_and_others_of_their_rows_ignored() -> None:
    body = answer(None, {"8": {"logprob": -0.5, "rank": 1}}, {"3": {"logprob": -0.1}, "9": {"logprob": -2.0}})
    assert wire_032.decode_score(body, "r", TOKENS, 1) == [-0.5, -2.0]
    assert wire_032.decode_score(body, "r", TOKENS, 2) == [-2.0]


def test_the_asked_for_token_is_found_beside_the_sampled_one() -> None:
    row = {
        "token_id": 4,
        "logprob": -0.1,
        "top_logprobs": [{"token_id": 4, "logprob": -0.1}, {"token_id": 9, "logprob": -3}],
    }
    body = json.dumps({"choices": [{"token_ids": [4], "logprobs": {"content": [row]}}]}).encode()
    assert wire_032.decode_score_of_one(body, "r", 9) == -3.0
    assert wire_032.decode_score_of_one(body, "r", 4) == -0.1
    with pytest.raises(EngineError, match=r"request r: the log-probability of token 5 is absent"):
        wire_032.decode_score_of_one(body, "r", 5)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "answer can't be read"),
        (answer(None, {"8": {"logprob": -0.5}}), "scored 2 of 3 tokens"),
        (answer(None, {"8": {"logprob": -0.5}}, {"3": {"logprob": -1.0}}), r"token 2 \(id 9\) is absent"),
        (answer(None, None, {"9": {"logprob": -1.0}}), r"token 1 \(id 8\) is absent"),
        (answer(None, {"8": {"logprob": -9999.0}}, {"9": {"logprob": -1.0}}), r"token 1 \(id 8\) is -9999.0"),
        (answer(None, {"8": {"logprob": 0.5}}, {"9": {"logprob": -1.0}}), r"token 1 \(id 8\) is 0.5"),
    ],
)
def test_an_answer_that_can_t_be_used_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(EngineError, match=f"request r: .*{said}"):
        wire_032.decode_score(body, "r", TOKENS, 1)
