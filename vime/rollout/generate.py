"""One sample from one engine: token ids in, token ids out."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2 import TemplateError

from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import GenerateRequest, Sampling
from vime.errors import GenerationAborted, SampleError
from vime.utils.types import Sample

_STATUS = {"stop": Sample.Status.COMPLETED, "length": Sample.Status.TRUNCATED}


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str: ...


@dataclass(frozen=True)
class GenerateSettings:
    """The settings that generation depends on."""

    max_response_tokens: int
    temperature: float
    apply_chat_template: bool


class SampleGenerator:
    """Renders prompts, asks an engine, and writes the answer into the sample."""

    def __init__(self, tokenizer: Tokenizer, settings: GenerateSettings) -> None:
        self._tokenizer, self._settings = tokenizer, settings

    def render(self, prompt: str | list[dict[str, Any]]) -> str:
        """Prompt text, through the chat template when the settings say so.

        Raises:
            SampleError: a chat without `--apply-chat-template`, or one that the template refuses.
        """
        if self._settings.apply_chat_template:
            chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            try:
                return self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            except (TemplateError, TypeError, ValueError, LookupError) as error:
                raise SampleError(
                    f"The chat template refuses the prompt: {type(error).__name__}: {error}.",
                    next_step="Correct the prompt, or give a model whose template allows it.",
                ) from error
        if not isinstance(prompt, str):
            raise SampleError("The prompt is a chat, allowed: text.", next_step="Add --apply-chat-template.")
        return prompt

    async def generate(self, engine: EngineClient, sample: Sample, *, cache_salt: str | None) -> None:
        """Fill tokens, response, log-probabilities, version spans and status of `sample`.

        Raises:
            GenerationAborted: the engine aborted the request, for a flush or a shutdown.
            EngineError: the engine failed or could not be reached.
        """
        prompt_ids = self._tokenizer.encode(self.render(sample.prompt), add_special_tokens=False)
        request = GenerateRequest(
            request_id=uuid.uuid4().hex,
            token_ids=prompt_ids,
            sampling=Sampling(self._settings.max_response_tokens, self._settings.temperature),
            cache_salt=cache_salt,
        )
        result = await engine.generate(request)
        if result.finish_reason not in _STATUS:
            raise GenerationAborted(
                f"sample {sample.index} of group {sample.group_index}: finish reason {result.finish_reason!r} after "
                f"{len(result.token_ids)} tokens"
            )
        sample.tokens = prompt_ids + list(result.token_ids)
        sample.response_length = len(result.token_ids)
        sample.response = self._tokenizer.decode(list(result.token_ids), skip_special_tokens=True)
        sample.rollout_log_probs = list(result.log_probs)
        sample.version_spans = [(span.version, span.start, span.stop) for span in result.version_spans]
        sample.weight_versions = [str(span.version) for span in result.version_spans]
        sample.status = _STATUS[result.finish_reason]
