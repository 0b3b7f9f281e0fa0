"""How far an engine's log-probabilities are from the trainer's around a publication that runs into its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from benchmarks.gpu.answers import Gaps, RunningAnswers, Size, SpanningAnswer, ask, differences, make_prompts, mean_gap
from benchmarks.gpu.publication import TIMEOUT_S, EverySource
from benchmarks.publish import Admission
from pipeline.probe_sequence import ProbeSequence
from pipeline.publisher import WeightPublisher
from pipeline.trainer_weights import PublishSettings, TrainerWeights
from pipeline.weight_transports.group import GroupTransport
from pipeline.weight_transports.shared import SharedTransport
from pipeline.weight_transports.transport import WeightTransport
from tests.vime.backends.megatron_utils.tiny_batches import Sequence_, pack, totals
from vime.backends.megatron_utils.trainer import MegatronTrainer
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import PublicationError, RunFailedError

MORE_TOKENS = 8
"""Requests that a publication runs into are so many times longer."""


class Update:
    """One step of the trainer between two publications into a running engine."""

    def __init__(self, size: Size, trainer: MegatronTrainer, gpus: int) -> None:
        self._size, self._trainer, self._gpus = size, trainer, gpus
        self._prompts = make_prompts(self._size)

    async def measure(self, address: str) -> dict[str, float]:
        """Mean gaps, and how many prompts the cache served."""
        settings = PublishSettings(backend="nccl" if self._gpus else "gloo")
        source = EverySource(TrainerWeights(self._trainer, 0, settings))
        transport: WeightTransport = GroupTransport(source, streams=False, timeout_s=TIMEOUT_S)
        if self._gpus == 1:
            transport = SharedTransport(source)
        try:
            async with EngineClient(address) as client:
                return await self._measure(client, transport)
        finally:
            source.rank.close()

    async def _measure(self, client: EngineClient, transport: WeightTransport) -> dict[str, float]:
        publisher = WeightPublisher(
            [client], transport, Admission(), start_version=0, flush_interval=0, timeout_s=TIMEOUT_S
        )
        await self._publish(publisher)
        first = await self._ask(client, None)
        again = await self._ask(client, None)
        cached = mean_gap(await asyncio.to_thread(differences, self._trainer, again))
        await asyncio.to_thread(self._step, first)
        running = RunningAnswers(client, self._prompts, MORE_TOKENS * self._size.response_tokens)
        await running.begun()
        await self._publish(publisher)
        unsalted, salted = await self._ask(client, None), await self._ask(client, f"v{publisher.version}")
        answers = await running.ended()
        gaps = await asyncio.to_thread(differences, self._trainer, [answer.sequence for answer in answers])
        stale, kept = around(answers, gaps, publisher.version)
        return {
            "cached_mean": cached,
            "cached_share": sum(sequence.cached for sequence in (*again, *unsalted)) / (2 * len(again)),
            "unsalted_mean": mean_gap(await asyncio.to_thread(differences, self._trainer, unsalted)),
            "salted_mean": mean_gap(await asyncio.to_thread(differences, self._trainer, salted)),
            "kept_mean": mean_gap(kept),
            "stale_mean": mean_gap(stale),
        }

    async def _ask(self, client: EngineClient, salt: str | None) -> list[ProbeSequence]:
        return await ask(client, self._prompts, self._size.response_tokens, salt=salt)

    async def _publish(self, publisher: WeightPublisher) -> None:
        publication = await publisher.publish()
        if not publication.raised:
            raise PublicationError(f"Version {publisher.version + 1} was not published: {publication.fenced}.")

    def _step(self, sampled: Sequence[ProbeSequence]) -> None:
        """On what the engine has sampled; half of it is wanted, half isn't."""
        sequences = [
            Sequence_(
                index=index,
                rollout=index,
                tokens=np.array(sequence.tokens, np.int32),
                loss_mask=np.ones(sequence.response_length, np.uint8),
                sampler_log_probs=np.array(sequence.log_probs, np.float32),
                advantage=1.0 if index % 2 else -1.0,
            )
            for index, sequence in enumerate(sampled)
        ]
        self._trainer.train_step([pack(sequences, range(len(sequences)))], totals(sequences))


def around(answers: Sequence[SpanningAnswer], gaps: Gaps, version: int) -> tuple[Gaps, Gaps]:
    """Differences of the tokens before `version`, and of those of it, of the answers that have both.

    Raises `RunFailedError` when there are none.
    """
    before, after = Gaps(), Gaps()
    for answer, gap in zip(answers, gaps, strict=True):
        is_new = np.array(answer.versions) >= version
        if is_new.any() and not is_new.all():
            before.append(gap[~is_new])
            after.append(gap[is_new])
    if not after:
        raise RunFailedError(
            f"None of {len(answers)} requests lived through the publication of version {version}.",
            next_step="Run it again; longer requests would help.",
        )
    return before, after
