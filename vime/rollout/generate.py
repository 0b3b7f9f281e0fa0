"""One sample from one engine: token ids in, token ids out."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vime.backends.vllm_utils.answer_info import answer_info
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import NO_COLUMNS, GenerateRequest, SampleColumns, Sampling
from vime.errors import GenerationAborted, SampleError
from vime.rollout.prompt_text import PromptText, Tokenizer
from vime.rollout.request_seed import request_seed
from vime.utils.types import Sample


@dataclass(frozen=True)
class GenerateSettings:
    """The settings that generation depends on. `columns` are what training needs of each token; evaluation has none.

    Tokens of the prompt don't count as response; prompt and response together have at most `max_context_tokens`. With
    `seed` each request gets a seed of its own, made of it and of the sample's number.
    """

    max_response_tokens: int
    temperature: float
    apply_chat_template: bool
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    top_p: float = 1.0
    top_k: int = -1
    min_response_tokens: int = 0
    max_context_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = False
    seed: int | None = None
    columns: SampleColumns = NO_COLUMNS


class SampleGenerator:
    """Renders prompts, asks an engine, and writes the answer into the sample."""

    def __init__(self, tokenizer: Tokenizer, settings: GenerateSettings) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self._prompts = PromptText(
            tokenizer, apply_chat_template=settings.apply_chat_template, template_kwargs=settings.template_kwargs
        )

    async def generate(self, engine: EngineClient, sample: Sample, *, cache_salt: str | None) -> None:
        """Fill tokens, response, log-probabilities, columns, version spans and status of `sample`.

        A sample that has tokens already, of a request that was aborted, is continued after them.

        Raises:
            GenerationAborted: the engine aborted the request, for a flush or a shutdown; the sample has what was
                generated until then.
            EngineError: the engine failed or could not be reached.
            SampleError: the prompt can't be rendered, has media or fills the context, or what is continued lacks what
                the rest will have.
        """
        if sample.multimodal_inputs:
            raise SampleError(
                f"sample {sample.index} of group {sample.group_index} has media "
                f"({', '.join(sample.multimodal_inputs)}), which vime's own generation doesn't send.",
                next_step="Give --custom-generate-function-path, or leave out --multimodal-keys.",
            )
        if not sample.tokens:
            sample.tokens = self._prompts.token_ids(sample.prompt, sample.metadata, sample.apply_chat_template_kwargs)
        remaining = self._room(sample)
        if remaining <= 0:
            sample.status = Sample.Status.TRUNCATED
            return
        request = self._request(sample, remaining, cache_salt)
        result = await engine.generate(request)
        sample.append_response_tokens(None, result.token_ids, result.log_probs, meta_info=answer_info(request, result))
        sample.response = self._text(sample)
        if sample.status is Sample.Status.ABORTED:
            raise GenerationAborted(
                f"sample {sample.index} of group {sample.group_index}: finish reason 'abort' after "
                f"{sample.response_length} tokens"
            )

    def _room(self, sample: Sample) -> int:
        """How many tokens the response may still get. Raises `SampleError` for a prompt that fills the context."""
        room, most = self._settings.max_response_tokens - sample.response_length, self._settings.max_context_tokens
        if most is None:
            return room
        if len(sample.tokens) >= most and not sample.response_length:
            raise SampleError(
                f"sample {sample.index} of group {sample.group_index}: the prompt has {len(sample.tokens)} tokens, "
                f"allowed: {most - 1}, for a context of {most}.",
                next_step="Raise --rollout-max-context-len or leave out long prompts with --rollout-max-prompt-len.",
                reason="prompt_too_long",
            )
        return min(room, most - len(sample.tokens))

    def _text(self, sample: Sample) -> str:
        """The response's text, without the special token that ended it.

        Decoded as a whole: tokens of one character may lie on both sides of an abort.
        """
        ids = sample.tokens[sample.prompt_length :]
        if sample.status is Sample.Status.COMPLETED and not self._tokenizer.decode(ids[-1:], skip_special_tokens=True):
            ids = ids[:-1]
        return self._tokenizer.decode(ids, skip_special_tokens=self._settings.skip_special_tokens)

    def _seed(self, sample: Sample) -> int | None:
        """Another one for what continues a response, which else would draw the numbers of its beginning again."""
        seed = self._settings.seed
        return None if seed is None else request_seed(seed, sample.index or 0, sample.response_length)

    def _request(self, sample: Sample, max_tokens: int, cache_salt: str | None) -> GenerateRequest:
        settings = self._settings
        return GenerateRequest(
            request_id=uuid.uuid4().hex,
            token_ids=sample.tokens,
            sampling=Sampling(
                max_tokens,
                settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                min_tokens=min(max_tokens, max(0, settings.min_response_tokens - sample.response_length)),
                seed=self._seed(sample),
                stop=settings.stop,
                stop_token_ids=settings.stop_token_ids,
                skip_special_tokens=settings.skip_special_tokens,
            ),
            cache_salt=cache_salt,
            columns=settings.columns,
            routes_from=len(sample.tokens) - 1 if sample.response_length else 0,
        )
