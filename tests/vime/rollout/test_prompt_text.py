"""How prompts become text: what the chat template is given."""

from __future__ import annotations

from typing import Any

import pytest

from vime.errors import SampleError
from vime.rollout.prompt_text import PromptText

TOOLS = [{"type": "function"}]


class Recording:
    """A tokenizer that remembers what its template was given; one token a character."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:  # noqa: ARG002
        return [ord(character) for character in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:  # noqa: ARG002
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str:
        self.given = {"chat": conversation, **kwargs}
        return "rendered"


def test_the_template_gets_tools_and_arguments_and_a_samples_own_win() -> None:
    tokenizer = Recording()
    text = PromptText(tokenizer, apply_chat_template=True, template_kwargs={"enable_thinking": True, "level": 1})
    assert text.token_ids("hi", {"tools": TOOLS}, {"enable_thinking": False}) == list(b"rendered")
    assert tokenizer.given == {
        "chat": [{"role": "user", "content": "hi"}],
        "tools": TOOLS,
        "tokenize": False,
        "add_generation_prompt": True,
        "enable_thinking": False,
        "level": 1,
    }


def test_without_tools_the_template_gets_none() -> None:
    tokenizer = Recording()
    PromptText(tokenizer, apply_chat_template=True).render([{"role": "user", "content": "hi"}], {"level": 1})
    assert "tools" not in tokenizer.given


def test_without_a_template_text_stays_text_and_a_chat_is_refused() -> None:
    text = PromptText(Recording(), apply_chat_template=False)
    assert text.render("hi") == "hi"
    with pytest.raises(SampleError, match="Add --apply-chat-template"):
        text.render([{"role": "user", "content": "hi"}])
