"""The calculator's conversations: what is a call, what it answers, and how a conversation goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from examples.multi_turn_tool import converse
from examples.multi_turn_tool.calculator import answer, is_call
from examples.multi_turn_tool.prepare import Problem
from examples.multi_turn_tool.reward import right_product
from examples.reverse.prepare import build_tokenizer
from vime.settings.parse import HookArgs, parse_settings
from vime.utils.types import Sample

TOKENIZER = build_tokenizer()


class Script:
    """Says one turn after another in place of an engine."""

    def __init__(self, *turns: str) -> None:
        self._turns = list(turns)

    async def generate(self, args: Any, sample: Sample, sampling_params: Any) -> Sample:  # noqa: ARG002
        ids = TOKENIZER.encode(self._turns.pop(0), add_special_tokens=False)
        sample.append_response_tokens(args, ids, [-0.5] * len(ids), meta_info={"finish_reason": {"type": "stop"}})
        sample.response = TOKENIZER.decode(sample.tokens[sample.prompt_length :], skip_special_tokens=False)
        return sample


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The conversation in which the model says these turns."""

    def talk(*turns: str) -> Sample:
        monkeypatch.setattr(converse, "generate", Script(*turns).generate)
        monkeypatch.setattr(converse, "_tokenizer", lambda _: TOKENIZER)
        args = HookArgs(parse_settings(["--hf-checkpoint", "model"]))
        return asyncio.run(converse.converse(args, Sample(prompt="12*34", label="0408"), {}))

    return talk


def test_a_conversation_with_the_right_call_ends_with_the_right_product(said: Any) -> None:
    sample = said("(12*34)", "0408<eos>")
    assert TOKENIZER.decode(sample.tokens) == "12*34=(12*34):0408=0408<eos>"
    assert sample.loss_mask == [1] * 7 + [0] * 6 + [1] * 5
    assert asyncio.run(right_product(None, sample)) == 1.0
    shown = "".join(text for text, _ in Problem(12, 34).parts())
    assert TOKENIZER.decode(sample.tokens) == f"{shown}<eos>"


@pytest.mark.parametrize("turns", [("(13*34)", "0442<eos>"), ("0407<eos>",), ("(1+2)", "0408=<eos>")])
def test_a_wrong_product_has_no_reward(said: Any, turns: tuple[str, ...]) -> None:
    assert asyncio.run(right_product(None, said(*turns))) == 0.0


def test_a_model_that_only_asks_is_answered_twice(said: Any) -> None:
    sample = said("(1)", "(2)", "(3)")
    assert converse.num_replies(sample) == 2
    assert TOKENIZER.decode(converse.last_turn(sample)) == "(3)"


@pytest.mark.parametrize(("turn", "reply"), [("(12*34)", ":0408"), ("(99*99)", ":9801"), ("(1*2)", ":----")])
def test_the_tool_answers_every_call(turn: str, reply: str) -> None:
    assert is_call(turn)
    assert answer(turn) == reply
    assert not is_call(f"{turn}<eos>")
