"""A few sequences from each engine, scored by the trainer: do the two agree, and if not, why."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np

from pipeline.preview.rehearsal import first_prompts
from pipeline.prompt_source import build_prompt_source
from vime.algorithms.parity import REMEDIES, Fault, ParityReport, Readings, compare
from vime.backends.megatron_utils.route_part import RoutePart
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import GenerateRequest, Sampling
from vime.data.batch import NucleusRows, PackedMicrobatch, RouteRows
from vime.errors import EngineError, ParityError
from vime.rollout.generate import GenerateSettings, SampleGenerator, Tokenizer
from vime.settings.groups import Settings

MAX_TOKENS = 32
"""Of a response."""


class ProbeSequence(msgspec.Struct, frozen=True):
    """One prompt and what an engine made of it."""

    tokens: list[int]
    response_length: int
    log_probs: list[float]
    """The sampler's, one for each response token."""
    cached: bool = False
    """Whether part of the prompt came from the prefix cache."""
    routes: list[list[list[int]]] | None = None
    """[T - 1, L, K], where the engine returns them."""
    nucleus: list[list[int]] | None = None
    """The tokens among which each response token was chosen, where the engine returns them."""


class EngineParity(msgspec.Struct, frozen=True):
    """One engine against the trainer."""

    engine: str
    report: ParityReport

    def __str__(self) -> str:
        report = self.report
        named = [f"; {finding.fault}: {finding.meaning}" for finding in report.findings if finding.differs]
        return f"{self.engine} against the trainer on {report.num_tokens} tokens: {report.gap}{''.join(named)}."


Score = Callable[[Sequence[ProbeSequence], bool], Awaitable[dict[str, list[float]]]]
"""The trainer's scores of sequences by field of `Readings`; true: only those under the start weights."""


async def probe_engines(settings: Settings, addresses: Sequence[str]) -> list[list[ProbeSequence]]:
    """What each engine makes of the first prompts, each asked twice, the second time with its prefix cached.

    Raises `EngineError`, and `DataError` or `SampleError` for prompts that can't be used.
    """
    from transformers import AutoTokenizer

    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(settings.checkpoint.hf_checkpoint, local_files_only=True)
    rollout = settings.rollout
    most = min(MAX_TOKENS, rollout.rollout_max_response_len or MAX_TOKENS)
    generate = GenerateSettings(most, rollout.rollout_temperature, settings.data.apply_chat_template)
    generator = SampleGenerator(tokenizer, generate)
    tasks = first_prompts(build_prompt_source(settings), settings.engine.parity_probes)
    prompts = [tokenizer.encode(generator.render(task.prompt), add_special_tokens=False) for task in tasks]
    sampling = Sampling(most, rollout.rollout_temperature, rollout.rollout_top_p, rollout.rollout_top_k)
    return list(await asyncio.gather(*(_probe(address, prompts, sampling) for address in addresses)))


async def _probe(address: str, prompts: Sequence[list[int]], sampling: Sampling) -> list[ProbeSequence]:
    async with EngineClient(address) as engine:
        salt = f"parity-{uuid.uuid4().hex}"
        found = []
        for _ in range(2):
            asked = (
                _ask(engine, prompt, dataclasses.replace(sampling, seed=number), salt)
                for number, prompt in enumerate(prompts)
            )
            found += await asyncio.gather(*asked)
    return [sequence for sequence in found if sequence.response_length]


async def _ask(engine: EngineClient, prompt: list[int], sampling: Sampling, salt: str) -> ProbeSequence:
    result = await engine.generate(GenerateRequest(uuid.uuid4().hex, prompt, sampling, salt))
    return ProbeSequence(
        tokens=prompt + result.token_ids,
        response_length=len(result.token_ids),
        log_probs=result.log_probs,
        cached=result.num_cached_tokens > 0,
        routes=None if result.routed_experts is None else result.routed_experts.tolist(),
        nucleus=result.sampling_mask,
    )


def pack_probe(sequence: ProbeSequence, part: RoutePart | None) -> PackedMicrobatch:
    """One sequence as the trainer reads it, with the routes of `part`."""
    length, response = len(sequence.tokens), sequence.response_length
    return PackedMicrobatch(
        tokens=np.array(sequence.tokens, np.int32),
        cu_seqlens=np.array([0, length], np.int32),
        response_lengths=np.array([response], np.int32),
        loss_mask=np.ones(response, np.uint8),
        sampler_log_probs=np.array(sequence.log_probs, np.float32),
        advantages=np.zeros(1, np.float32),
        mask_sums=np.full(1, response, np.float32),
        sample_indices=np.zeros(1, np.int64),
        nucleus=_nucleus(sequence.nucleus),
        routes=_routes(sequence, part),
    )


def _nucleus(rows: list[list[int]] | None) -> NucleusRows | None:
    if rows is None:
        return None
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return NucleusRows(np.array([token for row in rows for token in row], np.int32), offsets)


def _routes(sequence: ProbeSequence, part: RoutePart | None) -> RouteRows | None:
    if part is None or sequence.routes is None:
        return None
    tokens = part.tokens([len(sequence.tokens)])
    tokens = tokens[tokens < len(sequence.routes)]
    ids = np.array(sequence.routes, np.int32)[tokens][:, list(part.places)]
    return RouteRows(ids, tokens, part.layers, np.ones(1, bool))


async def engine_parity(
    name: str, sequences: Sequence[ProbeSequence], score: Score, *, temperature: float, threshold: float
) -> EngineParity:
    """Compare one engine; above `threshold` and without another explanation its start weights are tried too.

    Raises `EngineError` where it sampled nothing.
    """
    if not sequences:
        raise EngineError(f"{name} sampled no token of any probe.", next_step="Look at the engine's log.")
    known = {name: np.array(values) for name, values in (await score(sequences, False)).items()}
    lengths = [sequence.response_length for sequence in sequences]
    readings = Readings(
        sampler=np.array([value for sequence in sequences for value in sequence.log_probs]),
        cached=np.repeat([sequence.cached for sequence in sequences], lengths),
        temperature=temperature,
        **known,
    )
    report = compare(readings)
    if report.fault is None and report.gap.mean > threshold:
        more = {name: np.array(values) for name, values in (await score(sequences, True)).items()}
        report = compare(Readings(**{**vars(readings), **more}))
    return EngineParity(name, report)


def refuse_difference(found: Sequence[EngineParity], threshold: float) -> None:
    """Raise `ParityError` for the engines whose mean difference is above `threshold`."""
    wrong = [each for each in found if each.report.gap.mean > threshold]
    if wrong:
        fault = next((each.report.fault for each in wrong if each.report.fault is not None), None)
        raise ParityError(
            " ".join(map(str, wrong)) + f" Allowed: a mean of {threshold:g} (--parity-threshold).",
            next_step="No known fault explains it: compare the engine's and the trainer's model settings."
            if fault is None
            else REMEDIES[Fault(fault)],
        )
