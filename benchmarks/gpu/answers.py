"""What an engine makes of a few prompts, and how far a trainer's reading of it is."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from pipeline.probe_sequence import ProbeSequence, pack_probe
from tests.support.tiny_models import CHARACTERS
from vime.backends.megatron_utils.trainer import MegatronTrainer
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import NO_COLUMNS, GenerateRequest, SampleColumns, Sampling

Gaps = list[npt.NDArray[np.float64]]
"""Differences of log-probabilities, [R] of each sequence."""
TEMPERATURE = 0.7
_IDS = itertools.count()


@dataclass(frozen=True)
class Size:
    """How much is asked."""

    prompts: int
    prompt_tokens: int
    response_tokens: int


@dataclass
class SpanningAnswer:
    """One answer, token by token, and the version of the weights that each token was sampled from."""

    prompt: list[int]
    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]

    @property
    def sequence(self) -> ProbeSequence:
        return ProbeSequence(self.prompt + self.token_ids, len(self.token_ids), self.log_probs)


def make_prompts(size: Size) -> list[list[int]]:
    """Random prompts, the same at each call."""
    rng = np.random.default_rng(0)
    ids: npt.NDArray[np.int64] = rng.integers(3, 3 + len(CHARACTERS), (size.prompts, size.prompt_tokens))
    return [row.tolist() for row in ids]


async def ask(
    client: EngineClient,
    prompts: Sequence[list[int]],
    num_tokens: int,
    *,
    salt: str | None = None,
    columns: SampleColumns = NO_COLUMNS,
) -> list[ProbeSequence]:
    """One answer to each prompt, all at once. Requests with one salt share cached keys and values."""

    async def one(prompt: list[int]) -> ProbeSequence:
        result = await client.generate(_request(prompt, num_tokens, salt, columns))
        routes = None if result.routed_experts is None else result.routed_experts.tolist()
        cached = result.num_cached_tokens > 0
        return ProbeSequence(prompt + result.token_ids, len(result.token_ids), result.log_probs, cached, routes)

    return list(await asyncio.gather(*map(one, prompts)))


class RunningAnswers:
    """Answers that are under way, until they have ended."""

    def __init__(self, client: EngineClient, prompts: Sequence[list[int]], num_tokens: int) -> None:
        self._answers = [SpanningAnswer(prompt, [], [], []) for prompt in prompts]
        self._begun = [asyncio.Event() for _ in prompts]
        self._running = [
            asyncio.create_task(self._follow(client, number, num_tokens)) for number in range(len(prompts))
        ]

    async def begun(self) -> None:
        """Until each has its first tokens; raises what one has failed with."""
        waiting = asyncio.gather(*(event.wait() for event in self._begun))
        failing = asyncio.gather(*self._running)
        await asyncio.wait([waiting, failing], return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            failing.result()

    async def ended(self) -> list[SpanningAnswer]:
        await asyncio.gather(*self._running)
        return self._answers

    async def _follow(self, client: EngineClient, number: int, num_tokens: int) -> None:
        answer = self._answers[number]
        async for piece in client.stream(_request(answer.prompt, num_tokens, f"running-{number}", NO_COLUMNS)):
            answer.token_ids += piece.token_ids
            answer.log_probs += piece.log_probs
            for span in piece.version_spans:
                answer.versions += [span.version] * (span.stop - span.start)
            self._begun[number].set()


def _request(prompt: list[int], num_tokens: int, salt: str | None, columns: SampleColumns) -> GenerateRequest:
    number = next(_IDS)
    sampling = Sampling(num_tokens, TEMPERATURE, seed=number, ignore_eos=True)
    return GenerateRequest(f"answer-{number}", prompt, sampling, salt, columns)


def store(path: Path, sequences: Sequence[ProbeSequence]) -> None:
    """For a later stage."""
    path.write_bytes(msgspec.json.encode(sequences))


def stored(path: Path) -> list[ProbeSequence]:
    return msgspec.json.decode(path.read_bytes(), type=list[ProbeSequence])


def differences(trainer: MegatronTrainer, sequences: Sequence[ProbeSequence], *, replay: bool = False) -> Gaps:
    """The trainer's log-probability minus the sampler's, [R] of each sequence; with `replay` under its routes."""
    packed = [pack_probe(sequence, trainer.route_part) for sequence in sequences]
    scored = trainer.log_probs(packed, replay_routes=replay)
    return [ours.astype(np.float64) - batch.sampler_log_probs for ours, batch in zip(scored, packed, strict=True)]


def mean_gap(found: Gaps) -> float:
    """Mean absolute difference over all tokens."""
    return float(np.abs(np.concatenate(found)).mean())


def max_gap(found: Gaps) -> float:
    return float(np.abs(np.concatenate(found)).max())


def k3_gap(found: Gaps) -> float:
    """Mean over tokens of r - 1 - log r, r = trainer / sampler."""
    together = np.concatenate(found)
    return float((np.expm1(together) - together).mean())
