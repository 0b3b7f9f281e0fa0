"""One sample from one engine: token ids in, token ids out."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import GenerateRequest, Sampling
from vime.errors import GenerationAborted, SampleError
from vime.rollout.prompt_text import PromptText, Tokenizer
from vime.utils.types import Sample

_STATUS = {"stop": Sample.Status.COMPLETED, "length": Sample.Status.TRUNCATED}


@dataclass(frozen=True)
class GenerateSettings:
    """The settings that generation depends on."""

    max_response_tokens: int
    temperature: float
    apply_chat_template: bool
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class SampleGenerator:
    """Renders prompts, asks an engine, and writes the answer into the sample."""

    def __init__(self, tokenizer: Tokenizer, settings: GenerateSettings) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self._prompts = PromptText(
            tokenizer, apply_chat_template=settings.apply_chat_template, template_kwargs=settings.template_kwargs
        )

    async def generate(self, engine: EngineClient, sample: Sample, *, cache_salt: str | None) -> None:
        """Fill tokens, response, log-probabilities, version spans and status of `sample`.

        Raises:
            GenerationAborted: the engine aborted the request, for a flush or a shutdown.
            EngineError: the engine failed or could not be reached.
            SampleError: the prompt can't be rendered, or has media.
        """
        if sample.multimodal_inputs:
            raise SampleError(
                f"sample {sample.index} of group {sample.group_index} has media "
                f"({', '.join(sample.multimodal_inputs)}), which vime's own generation doesn't send.",
                next_step="Give --custom-generate-function-path, or leave out --multimodal-keys.",
            )
        prompt_ids = self._prompts.token_ids(sample.prompt, sample.metadata, sample.apply_chat_template_kwargs)
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
