"""Which tokens of a conversation are trained, under templates of each kind."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from vime.errors import SampleError
from vime.rollout.conversation import encode_conversation

PLAIN = (
    "{% if messages[0].role != 'system' %}<s>system\ndefault<e>\n{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
"""Puts a system message of its own first, as Qwen2.5 does."""
THINKING = (
    "{% if tools %}<s>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}"
    "tools {{ tools | length }}<e>\n"
    "{% elif messages[0].role == 'system' %}<s>system\n{{ messages[0].content }}<e>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% elif m.role == 'assistant' %}<s>assistant\n"
    "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</t>')[-1] }}{% endif %}<e>\n"
    "{% else %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
"""Drops what older turns thought, as Qwen3 does."""
DISTILLED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
)


class Characters:
    """One token for each character, and one each for the marks `<s>` and `<e>`."""

    eos_token = "<e>"

    def __init__(self, template: str) -> None:
        self.all_special_ids = [1, 2]
        self._template = jinja2.Environment().from_string(template)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(mark) for mark in text.replace("<s>", "\1").replace("<e>", "\2")]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        text = "".join(map(chr, token_ids))
        return text if skip_special_tokens else text.replace("\1", "<s>").replace("\2", "<e>")

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str:
        assert kwargs.pop("tokenize") is False
        assert all("step_loss_mask" not in message for message in conversation)
        if conversation[0]["role"] == "refused":
            raise jinja2.TemplateError("no such role")
        return self._template.render(messages=conversation, **kwargs)


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def encoded(template: str, kind: str, *messages: dict[str, Any], tools: list[Any] | None = None) -> tuple[str, str]:
    """(the whole text, the trained text with a bar between the parts that lie apart)."""
    tokenizer = Characters(template)
    ids, mask = encode_conversation(tokenizer, messages, kind, tools)
    assert len(ids) == len(mask)
    parts, before = [""], 0
    for token, kept in zip(ids, mask, strict=True):
        if kept and not before:
            parts.append("")
        before = kept
        if kept:
            parts[-1] += tokenizer.decode([token], skip_special_tokens=False)
    return tokenizer.decode(ids, skip_special_tokens=False), "|".join(parts[1:])


CHAT = (turn("user", "hi"), turn("assistant", "yo"), turn("user", "more"), turn("assistant", "ok"))


def test_assistant_turns_are_trained_with_their_end_and_nothing_else() -> None:
    text, trained = encoded(PLAIN, "qwen", *CHAT)
    assert text == Characters(PLAIN).apply_chat_template(list(CHAT), tokenize=False)
    assert trained == "yo<e>|ok<e>"


def test_a_turn_with_step_loss_mask_zero_stays_in_the_context_untrained() -> None:
    muted = (CHAT[0], {**CHAT[1], "step_loss_mask": 0}, CHAT[2], {**CHAT[3], "step_loss_mask": 1})
    text, trained = encoded(PLAIN, "qwen", *muted)
    assert "yo<e>" in text
    assert trained == "ok<e>"
    spoken = (turn("user", "hi", step_loss_mask=1), CHAT[1])
    assert encoded(PLAIN, "qwen", *spoken)[1] == "yo<e>", "a user's turn is never trained"


@pytest.mark.parametrize("kind", ["qwen", "qwen3"])
def test_a_default_system_message_and_several_messages_before_an_answer_are_rendered_once(kind: str) -> None:
    messages = (turn("user", "a"), turn("user", "b"), turn("assistant", "c"), turn("tool", "d"), turn("assistant", "e"))
    text, trained = encoded(PLAIN, kind, *messages)
    assert text == Characters(PLAIN).apply_chat_template(list(messages), tokenize=False)
    assert trained == "c<e>|e<e>"


def test_what_an_older_turn_thought_is_kept_and_trained_with_qwen3() -> None:
    messages = (CHAT[0], turn("assistant", "hm</t>yo"), CHAT[2], turn("assistant", "so</t>ok"))
    text, trained = encoded(THINKING, "qwen3", *messages)
    assert trained == "hm</t>yo<e>|so</t>ok<e>"
    assert text.count("<s>assistant\n") == 2


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_system_message_and_tools_come_first(kind: str) -> None:
    text, trained = encoded(THINKING, kind, turn("system", "be"), *CHAT, tools=[{}, {}])
    assert text.startswith("<s>system\nbe tools 2<e>\n<s>user\nhi<e>\n<s>assistant\nyo<e>\n<s>user\nmore")
    assert trained == "yo<e>|ok<e>"


def test_qwen_refuses_a_template_that_changes_older_turns() -> None:
    messages = (CHAT[0], turn("assistant", "hm</t>yo"), CHAT[2], CHAT[3])
    with pytest.raises(SampleError, match="the chat template renders") as caught:
        encoded(THINKING, "qwen", *messages)
    assert "qwen3" in (caught.value.next_step or "")


def test_the_last_answer_alone_is_trained_as_it_is_with_distill_qwen() -> None:
    messages = (turn("user", "a"), turn("assistant", "x</think>b"), turn("user", "c"))
    text, trained = encoded(DISTILLED, "distill_qwen", *messages, turn("assistant", "<think>\nhm</think>d"))
    assert text == "[user]a[assistant]b[user]c[assistant]<think>\nhm</think>d<e>"
    assert trained == "hm</think>d<e>"


@pytest.mark.parametrize(
    ("messages", "said", "reason"),
    [
        ([turn("user", "a")], "no assistant turn", "no_assistant_turn"),
        ([turn("user", "a"), turn("assistant", "b", step_loss_mask=2)], "step_loss_mask is 2, allowed: 0 or 1",
         "step_loss_mask"),
        ([turn("refused", "a"), turn("assistant", "b")], "refuses the conversation: TemplateError", "chat_template"),
    ],
)  # fmt: skip
def test_a_conversation_that_can_t_be_trained_says_why(messages: list[Any], said: str, reason: str) -> None:
    with pytest.raises(SampleError, match=said) as caught:
        encode_conversation(Characters(PLAIN), messages, "qwen")
    assert caught.value.reason == reason


def test_an_answer_must_come_last_with_distill_qwen() -> None:
    with pytest.raises(SampleError, match="last message is not the assistant's"):
        encoded(DISTILLED, "distill_qwen", *CHAT, turn("user", "more"))
