"""A prompt as the text and the token ids that the model gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

from vime.data.records import PromptRecord
from vime.errors import SampleError


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str: ...


class PromptText:
    """Renders prompts, through the chat template where the settings say so."""

    def __init__(
        self, tokenizer: Tokenizer, *, apply_chat_template: bool, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """`template_kwargs` are those of --apply-chat-template-kwargs."""
        self._tokenizer, self._applies, self._kwargs = tokenizer, apply_chat_template, dict(template_kwargs or {})

    def render(
        self,
        prompt: str | list[dict[str, Any]],
        metadata: Mapping[str, Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text. The template gets `metadata["tools"]`, and a sample's own `template_kwargs` over those of the run.

        Raises:
            SampleError: a chat without `--apply-chat-template`, or one that the template refuses.
        """
        if not self._applies:
            if isinstance(prompt, str):
                return prompt
            raise SampleError("The prompt is a chat, allowed: text.", next_step="Add --apply-chat-template.")
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        tools = (metadata or {}).get("tools")
        given = {**({} if tools is None else {"tools": tools}), **self._kwargs, **(template_kwargs or {})}
        try:
            return self._tokenizer.apply_chat_template(
                chat, **{"tokenize": False, "add_generation_prompt": True, **given}
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise SampleError(
                f"The chat template refuses the prompt: {type(error).__name__}: {error}.",
                next_step="Correct the prompt, or give a model whose template allows it.",
            ) from error

    def token_ids(
        self,
        prompt: str | list[dict[str, Any]],
        metadata: Mapping[str, Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of the rendered prompt. Raises `SampleError` as `render` does."""
        text = self.render(prompt, metadata, template_kwargs)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def count_tokens(self, records: Sequence[PromptRecord]) -> list[int]:
        """Number of tokens of each record's prompt. Raises `SampleError` as `render` does."""
        return [len(self.token_ids(record.prompt, record.metadata)) for record in records]
