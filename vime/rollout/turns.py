"""Conversations with tools as token ids: what the model said stays as it was sampled, what others say is appended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from vime.errors import SampleError
from vime.rollout.prompt_text import PromptText, Tokenizer
from vime.utils.types import Sample

Message = dict[str, Any]
_QUESTION: Message = {"role": "user", "content": "probe"}
_ANSWER = "vime-probe-answer"


class Turns:
    """Token ids of prompts, and of the turns between two answers of the model, by a chat template.

    Only what is new is ever tokenised, so no token of the model's is replaced by another one for the same text.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, tools: Sequence[Any] = (), template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = {**({"tools": list(tools)} if tools else {}), **(template_kwargs or {})}
        self._prompts = PromptText(tokenizer, apply_chat_template=True, template_kwargs=self._kwargs)

    def prompt(self, prompt: str | list[Message]) -> list[int]:
        """Ids of a conversation up to where the model answers. Raises `SampleError`."""
        return self._prompts.token_ids(prompt)

    def reply(self, sample: Sample, messages: Sequence[Message]) -> list[int]:
        """Ids to append when others answered the model: the end of its turn, `messages`, and the next turn's beginning.

        The token that ends its turn is left out where the model said it itself. Raises `SampleError` for messages that
        the template refuses, or where it changes the model's text.
        """
        text = self._render([_QUESTION, {"role": "assistant", "content": _ANSWER}, *messages])
        _, found, after = text.partition(_ANSWER)
        if not found:
            raise SampleError("the chat template leaves out what the assistant said.", reason="chat_template")
        ids = self._tokenizer.encode(after, add_special_tokens=False)
        return ids[1:] if sample.response_length and ids[:1] == sample.tokens[-1:] else ids

    def _render(self, messages: list[Message]) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, **{"tokenize": False, "add_generation_prompt": True, **self._kwargs}
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise SampleError(
                f"the chat template refuses the conversation: {type(error).__name__}: {error}.", reason="chat_template"
            ) from error
