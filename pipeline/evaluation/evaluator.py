"""Evaluates in the producer's process: through its gate, at the engines that serve its rollouts."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.evaluation.answers import answer_of
from pipeline.evaluation.keeper import ResultKeeper
from pipeline.evaluation.prompts import EvalSet
from pipeline.evaluation.records import EvalAnswer, EvaluationRecord
from pipeline.group_start import anew
from pipeline.sample_maker import SampleMaker
from vime.errors import EngineError, GenerationAborted
from vime.rollout.rewards import RewardFunction, reward_value, score
from vime.rollout.sampling import SamplingSettings
from vime.utils.types import Sample

MAX_ABORTS = 50
"""A publication aborts the requests in flight where it flushes the cache; so many may hit one answer."""


@dataclass(frozen=True)
class EvaluatorSettings:
    """The settings that evaluations depend on."""

    max_requests: int
    """Answers that are generated at once."""
    max_attempts: int
    """Failures of an engine that an answer may meet."""
    reward_timeout_s: float
    retry_s: float = 1.0


@dataclass(frozen=True)
class EvaluatedSet:
    """A data set with how it is answered and scored."""

    prompts: EvalSet
    sampling: SamplingSettings
    reward: RewardFunction
    reward_key: str | None


@dataclass
class _Answering:
    """One evaluation that is going on."""

    unanswered: int
    generated: asyncio.Event
    started: float
    generate_s: float = 0.0

    def count_generated(self) -> None:
        """One more response is there, or will never be."""
        self.unanswered -= 1
        if not self.unanswered:
            self.generate_s = time.monotonic() - self.started
            self.generated.set()


_Answered = tuple[EvalAnswer, Sample]


class Evaluator:
    """Makes evaluations; several may go on at once. `maker` leaves samples unscored."""

    def __init__(
        self,
        settings: EvaluatorSettings,
        sets: Sequence[EvaluatedSet],
        maker: SampleMaker,
        hook_args: Any,
        keeper: ResultKeeper,
    ) -> None:
        self._settings, self._sets, self._maker, self._hook_args = settings, list(sets), maker, hook_args
        self._keeper = keeper
        self._requests = asyncio.Semaphore(settings.max_requests)
        self._generated: defaultdict[tuple[int, str], asyncio.Event] = defaultdict(asyncio.Event)
        """By step and branch."""

    async def evaluate(self, step: int, branch: str) -> EvaluationRecord:
        """Answer every prompt of every data set, score, and keep what came of it.

        An answer that fails is counted under its reason, and nowhere else. Raises `StorageError`.
        """
        answering = self._begun(self._generated[step, branch])
        try:
            answered = await self._answer_all(answering)
        finally:
            answering.generated.set()
        return await self._keeper.keep(
            {name: [answer for answer, _ in made] for name, made in answered.items()},
            {name: _for_hooks(made) for name, made in answered.items()},
            step=step,
            branch=branch,
            started=answering.started,
            generate_s=answering.generate_s,
        )

    async def results(self) -> dict[str, dict[str, list[Any]]]:
        """Name of a data set -> its rewards, truncated and samples, all answered and scored; nothing is kept."""
        return {name: _for_hooks(made) for name, made in (await self._answer_all(self._begun(asyncio.Event()))).items()}

    async def generated(self, step: int, branch: str) -> None:
        """Wait until every response of an evaluation is there; rewards may be missing.

        Also of one that is yet to begin: a request for it and this one may overtake each other on their way.
        """
        await self._generated[step, branch].wait()

    def _begun(self, generated: asyncio.Event) -> _Answering:
        """An evaluation without an answer yet, which sets `generated` when all responses are there."""
        number = sum(len(each.prompts.source) * each.prompts.num_attempts for each in self._sets)
        return _Answering(number, generated, time.monotonic())

    async def _answer_all(self, answering: _Answering) -> dict[str, list[_Answered]]:
        every = await asyncio.gather(*(self._answer_set(each, answering) for each in self._sets))
        return {each.prompts.name: made for each, made in zip(self._sets, every, strict=True)}

    async def _answer_set(self, evaluated: EvaluatedSet, answering: _Answering) -> list[_Answered]:
        """Answers in the order of their prompts; the first error of the evaluation itself ends all."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._answer(evaluated, sample, source, answering))
                for sample, source in evaluated.prompts.samples()
            ]
        return [task.result() for task in tasks]

    async def _answer(self, evaluated: EvaluatedSet, sample: Sample, source: str, answering: _Answering) -> _Answered:
        attempt = (sample.index or 0) % evaluated.prompts.num_attempts
        error: Exception | None = None
        try:
            try:
                async with self._requests:
                    sample = await self._generate(sample, evaluated.sampling)
            finally:
                answering.count_generated()
            await self._score(evaluated, sample)
        except Exception as failure:  # the boundary to what engines, rewards and user code do to one sample
            error = failure
        answer = answer_of(
            evaluated.prompts.name,
            sample,
            attempt=attempt,
            source=source,
            reward_key=evaluated.reward_key,
            error=error,
        )
        return answer, sample

    async def _generate(self, start: Sample, sampling: SamplingSettings) -> Sample:
        """A response from its beginning, so that no answer is made of two attempts.

        Tried again after an abort, and after failures of an engine, which say nothing of the answer.
        """
        aborts = failures = 0
        while True:
            sample = anew(start)
            try:
                return (await self._maker.make(sample, sampling=sampling, evaluation=True))[-1]
            except GenerationAborted:
                aborts += 1
                if aborts >= MAX_ABORTS:
                    raise
            except EngineError:
                failures += 1
                if failures >= self._settings.max_attempts:
                    raise
            await asyncio.sleep(self._settings.retry_s)

    async def _score(self, evaluated: EvaluatedSet, sample: Sample) -> None:
        """Reward a sample that has none yet; a function of the user's own may have given one. Raises `RewardError`."""
        if sample.reward is None:
            await score(
                evaluated.reward,
                self._hook_args,
                sample,
                timeout_s=self._settings.reward_timeout_s,
                key=evaluated.reward_key,
            )
        reward_value(sample, evaluated.reward_key)


def _for_hooks(answered: Sequence[_Answered]) -> dict[str, list[Any]]:
    """A data set as the user's functions get it; the reward of an answer that failed is None."""
    return {
        "rewards": [answer.reward for answer, _ in answered],
        "truncated": [sample.status is Sample.Status.TRUNCATED for _, sample in answered],
        "samples": [sample for _, sample in answered],
    }
