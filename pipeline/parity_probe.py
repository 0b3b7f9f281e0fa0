"""A few sequences from each engine, on the first prompts of a run."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Sequence

import numpy as np

from pipeline.preview.rehearsal import first_prompts
from pipeline.probe_sequence import ProbeSequence
from pipeline.prompt_source import build_prompt_source
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import GenerateRequest, Nucleus, SampleColumns, Sampling
from vime.data.cursor import PromptTask
from vime.errors import EngineError, SampleError
from vime.rollout.prompt_text import PromptText, Tokenizer
from vime.rollout.tokenizer import load_tokenizer
from vime.settings.groups import Settings

MAX_TOKENS = 32
"""Of a response."""


async def probe_engines(settings: Settings, addresses: Sequence[str]) -> list[list[ProbeSequence]]:
    """What each engine makes of the first prompts, each asked twice, the second time with its prefix cached.

    Prompts that can't be rendered, and those that an engine refuses (too long ones), are left out. Raises what is
    wrong with the first where none is left.
    """
    tokenizer: Tokenizer = load_tokenizer(settings.checkpoint.hf_checkpoint)
    rollout, data = settings.rollout, settings.data
    most = min(MAX_TOKENS, rollout.rollout_max_response_len or MAX_TOKENS)
    text = PromptText(
        tokenizer, apply_chat_template=data.apply_chat_template, template_kwargs=data.apply_chat_template_kwargs
    )
    token_ids = _token_ids(text, first_prompts(build_prompt_source(settings), settings.engine.parity_probes))
    sampling = Sampling(most, rollout.rollout_temperature, rollout.rollout_top_p, rollout.rollout_top_k)
    columns = SampleColumns(
        routes=settings.objective.use_rollout_routing_replay, nucleus=settings.rollout.rollout_top_p < 1
    )
    return list(await asyncio.gather(*(_probe(address, token_ids, sampling, columns) for address in addresses)))


def _token_ids(text: PromptText, tasks: Sequence[PromptTask]) -> list[list[int]]:
    prompts: list[list[int]] = []
    errors: list[SampleError] = []
    for task in tasks:
        try:
            prompts.append(text.token_ids(task.prompt, task.metadata))
        except SampleError as error:
            errors.append(error)
    if errors and not prompts:
        raise errors[0]
    return prompts


async def _probe(
    address: str, prompts: Sequence[list[int]], sampling: Sampling, columns: SampleColumns
) -> list[ProbeSequence]:
    found: list[ProbeSequence] = []
    errors: list[EngineError | SampleError] = []
    async with EngineClient(address) as engine:
        salt = f"parity-{uuid.uuid4().hex}"
        for _ in range(2):
            asked = (
                _ask(engine, prompt, dataclasses.replace(sampling, seed=number), salt, columns)
                for number, prompt in enumerate(prompts)
            )
            for answer in await asyncio.gather(*asked):
                if isinstance(answer, EngineError | SampleError):
                    errors.append(answer)
                else:
                    found.append(answer)
    if errors and not found:
        raise errors[0]
    return [sequence for sequence in found if sequence.response_length]


async def _ask(
    engine: EngineClient, prompt: list[int], sampling: Sampling, salt: str, columns: SampleColumns
) -> ProbeSequence | EngineError | SampleError:
    try:
        result = await engine.generate(GenerateRequest(uuid.uuid4().hex, prompt, sampling, salt, columns=columns))
    except (EngineError, SampleError) as error:
        return error
    return ProbeSequence(
        tokens=prompt + result.token_ids,
        response_length=len(result.token_ids),
        log_probs=result.log_probs,
        cached=result.num_cached_tokens > 0,
        routes=None if result.routed_experts is None else result.routed_experts.tolist(),
        nucleus=None if result.nucleus is None else _by_token(result.nucleus),
    )


def _by_token(nucleus: Nucleus) -> list[list[int]]:
    return [ids.tolist() for ids in np.split(nucleus.ids, nucleus.offsets[1:-1])]
