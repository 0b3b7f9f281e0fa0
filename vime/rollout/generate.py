"""One sample from one engine: token ids in, token ids out."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vime.backends.vllm_utils.answer_info import answer_info, piece_info
from vime.backends.vllm_utils.protocol import NO_COLUMNS, GenerateRequest, SampleColumns, Sampler
from vime.errors import GenerationAborted, SampleError
from vime.rollout.media import media_parts, with_media
from vime.rollout.prompt_text import PromptText, Tokenizer
from vime.rollout.sampling import SamplingSettings
from vime.utils.routed_experts import num_routed
from vime.utils.types import Sample

HandOver = Callable[[], Awaitable[None]]
"""Shows a sample to whoever wants it in pieces, and returns when that one wants more."""


@dataclass(frozen=True)
class GenerateSettings:
    """What every request has. `columns` are what training needs of each token; evaluation has none."""

    apply_chat_template: bool
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    columns: SampleColumns = NO_COLUMNS


class SampleGenerator:
    """Renders prompts, asks an engine, and writes the answer into the sample."""

    def __init__(self, tokenizer: Tokenizer, settings: GenerateSettings) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self._prompts = PromptText(
            tokenizer, apply_chat_template=settings.apply_chat_template, template_kwargs=settings.template_kwargs
        )

    async def generate(
        self,
        engine: Sampler,
        sample: Sample,
        sampling: SamplingSettings,
        *,
        cache_salt: str | None,
        evaluation: bool = False,
        hand_over: HandOver | None = None,
    ) -> None:
        """Fill tokens, response, log-probabilities, columns, version spans and status of `sample`.

        A sample that has tokens already, of a request that was aborted, is continued after them. In `evaluation` no
        columns are asked for. With `hand_over` the tokens come in pieces: it is awaited after each of them.

        Raises:
            GenerationAborted: the engine aborted the request, for a flush or a shutdown; the sample has what was
                generated until then.
            EngineError: the engine failed or could not be reached; a streamed sample has what came until then.
            SampleError: the prompt or its media can't be rendered, or fill the context, what is continued lacks what
                the rest will have, or a stream needs columns or has media.
        """
        request = self._request(sample, sampling, cache_salt, evaluation=evaluation)
        if request is None:
            sample.status = Sample.Status.TRUNCATED
            return
        if hand_over is None:
            result = await engine.generate(request)
            if result.prompt_token_ids is not None:
                sample.tokens = list(result.prompt_token_ids)
            sample.append_response_tokens(
                None, result.token_ids, result.log_probs, meta_info=answer_info(request, result)
            )
            sample.response = self._text(sample, skip_special_tokens=sampling.skip_special_tokens)
        else:
            await self._stream(engine, request, sample, sampling, hand_over)
        if sample.status is Sample.Status.ABORTED:
            raise GenerationAborted(
                f"sample {sample.index} of group {sample.group_index}: finish reason 'abort' after "
                f"{sample.response_length} tokens"
            )

    async def _stream(
        self,
        engine: Sampler,
        request: GenerateRequest,
        sample: Sample,
        sampling: SamplingSettings,
        hand_over: HandOver,
    ) -> None:
        if not request.columns.is_empty:
            raise SampleError(
                f"sample {sample.index} of group {sample.group_index}: a stream has tokens, log-probabilities and "
                "policy versions alone, and the objective needs candidates, nuclei or routes too.",
                next_step="Call generate in place of generate_in_pieces.",
                reason="streamed_columns",
            )
        if request.media:
            raise SampleError(
                f"sample {sample.index} of group {sample.group_index} has media, allowed in a stream: text.",
                next_step="Call generate in place of generate_in_pieces.",
                reason="streamed_media",
            )
        is_first = True
        async with contextlib.aclosing(engine.stream(request)) as pieces:
            async for piece in pieces:
                info = piece_info(piece, is_first=is_first)
                sample.append_response_tokens(None, piece.token_ids, piece.log_probs, meta_info=info)
                sample.response = self._text(sample, skip_special_tokens=sampling.skip_special_tokens)
                is_first = False
                await hand_over()

    def _request(
        self, sample: Sample, sampling: SamplingSettings, cache_salt: str | None, *, evaluation: bool
    ) -> GenerateRequest | None:
        """What to ask for, after rendering the prompt of a sample that has no tokens; None without room for more."""
        media = media_parts(sample.multimodal_inputs or {})
        asked = self._tokens_with_media(sample) if media else None
        if asked is not None and not sample.tokens:
            sample.tokens = list(asked)
        if not sample.tokens:
            sample.tokens = self._prompts.token_ids(sample.prompt, sample.metadata, sample.apply_chat_template_kwargs)
        remaining = sampling.room(sample)
        if remaining <= 0:
            return None
        return GenerateRequest(
            request_id=uuid.uuid4().hex,
            token_ids=list(sample.tokens) if asked is None else asked,
            sampling=sampling.of_request(sample, remaining),
            cache_salt=cache_salt,
            columns=NO_COLUMNS if evaluation else self._settings.columns,
            routes_from=num_routed(sample.rollout_routed_experts),
            media=media,
        )

    def _tokens_with_media(self, sample: Sample) -> list[int]:
        """Prompt with one placeholder for each medium, which the engine makes as many as it takes, and the response."""
        if not self._settings.apply_chat_template:
            raise SampleError(
                f"sample {sample.index} of group {sample.group_index} has media, allowed: text.",
                next_step="Give --apply-chat-template: its placeholders are the model's own.",
            )
        chat = with_media(sample.prompt, sample.multimodal_inputs or {})
        prompt = self._prompts.token_ids(chat, sample.metadata, sample.apply_chat_template_kwargs)
        return [*prompt, *sample.tokens[sample.prompt_length :]]

    def _text(self, sample: Sample, *, skip_special_tokens: bool) -> str:
        """The response's text, without the special token that ended it.

        Decoded as a whole: tokens of one character may lie on both sides of an abort.
        """
        ids = sample.tokens[sample.prompt_length :]
        if sample.status is Sample.Status.COMPLETED and not self._tokenizer.decode(ids[-1:], skip_special_tokens=True):
            ids = ids[:-1]
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
