"""Conversations as token ids: only what is new is tokenised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import build_tokenizer
from vime.errors import SampleError
from vime.rollout.turns import Turns
from vime.utils.types import Sample

TEMPLATE = (
    "{% if tools %}<bos>tools:{{ tools|length }}<eos>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' and not m.content %}{{ raise_exception('empty') }}{% endif %}"
    "<bos>{{ m.role }}:{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)
TOOL = [{"role": "tool", "content": "0408"}]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    tokenizer = build_tokenizer(tmp_path)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def answered(tokenizer: Any, prompt: list[int], text: str) -> Sample:
    said = ids_of(tokenizer, text)
    return Sample(tokens=[*prompt, *said], response_length=len(said))


@pytest.mark.parametrize(("said", "added"), [("(12*34)<eos>", ""), ("(12*34)", "<eos>")])
def test_a_conversation_is_what_the_template_renders_whoever_ended_the_models_turn(
    tokenizer: Any, said: str, added: str
) -> None:
    turns = Turns(tokenizer)
    sample = answered(tokenizer, turns.prompt("12*34"), said)
    reply = turns.reply(sample, TOOL)
    assert reply == ids_of(tokenizer, f"{added}<bos>tool:0408<eos><bos>assistant:")
    messages = [{"role": "user", "content": "12*34"}, {"role": "assistant", "content": "(12*34)"}, *TOOL]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert [*sample.tokens, *reply] == ids_of(tokenizer, whole)


def test_tools_are_told_in_the_prompt_and_not_again(tokenizer: Any) -> None:
    turns = Turns(tokenizer, tools=[{"name": "calculator"}])
    prompt = turns.prompt("12*34")
    assert prompt == ids_of(tokenizer, "<bos>tools:1<eos><bos>user:12*34<eos><bos>assistant:")
    reply = turns.reply(answered(tokenizer, prompt, "(12*34)<eos>"), TOOL)
    assert reply == ids_of(tokenizer, "<bos>tool:0408<eos><bos>assistant:")


def test_what_the_template_refuses_is_the_samples_failure(tokenizer: Any) -> None:
    turns = Turns(tokenizer)
    with pytest.raises(SampleError, match="the chat template refuses the conversation: TemplateError: empty"):
        turns.reply(answered(tokenizer, [1], "a"), [{"role": "tool", "content": ""}])
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(SampleError, match="leaves out what the assistant said"):
        turns.reply(answered(tokenizer, [1], "a"), TOOL)
