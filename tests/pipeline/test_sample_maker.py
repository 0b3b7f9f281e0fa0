"""One sample without a queue: what its requests are asked for, and when they may start."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pipeline.request_gate import RequestGate
from pipeline.sample_maker import MakerSettings, SampleMaker
from pipeline.serving_engines import ServingEngines
from tests.pipeline.stream_parts import constant_reward
from vime.errors import RewardError, SampleError
from vime.rollout.sampling import SamplingSettings
from vime.utils.types import Sample

RUN = SamplingSettings(20, temperature=0.7, stop=("end",))


class Listening:
    """Notes what it is asked, and answers when it may."""

    def __init__(self) -> None:
        self.asked: list[tuple[str | None, SamplingSettings, bool]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def generate(
        self, engine: Any, sample: Sample, sampling: SamplingSettings, *, cache_salt: str | None, evaluation: bool
    ) -> None:
        assert engine is None
        self.asked.append((cache_salt, sampling, evaluation))
        await self.may_answer.wait()
        sample.tokens, sample.response_length, sample.status = [1, 2, 3], 2, Sample.Status.COMPLETED


class Teacher:
    async def score(self, sample: Sample) -> None:
        sample.teacher_log_probs = [-1.0] * sample.response_length


def maker_of(
    gate: RequestGate, generator: Listening, *, salt: bool = True, reward: Any = constant_reward
) -> SampleMaker:
    return SampleMaker(MakerSettings(RUN, 1.0, None, salt), gate, generator, reward, None, Teacher())


def fresh(**values: Any) -> Sample:
    return Sample(group_index=0, index=0, prompt="p", **values)


async def test_new_requests_have_the_salt_of_the_present_version_and_running_ones_keep_theirs() -> None:
    gate, generator = RequestGate(ServingEngines([])), Listening()
    maker, samples = maker_of(gate, generator), [fresh(), fresh()]
    generator.may_answer.clear()
    gate.resume(1)
    running = asyncio.create_task(maker.make(samples[0]))
    while not generator.asked:
        await asyncio.sleep(0)
    gate.pause()
    waiting = asyncio.create_task(maker.make(samples[1]))
    await asyncio.sleep(0.01)
    assert [salt for salt, _, _ in generator.asked] == ["v1"], "nothing starts while the gate is shut"
    gate.resume(2)
    generator.may_answer.set()
    await asyncio.gather(running, waiting)
    assert [salt for salt, _, _ in generator.asked] == ["v1", "v2"]


async def test_a_gate_that_is_shut_again_before_those_who_waited_have_gone_on_holds_them() -> None:
    gate, generator = RequestGate(ServingEngines([])), Listening()
    making = asyncio.create_task(maker_of(gate, generator).make(fresh()))
    await asyncio.sleep(0.01)
    gate.resume(1)
    gate.pause()
    await asyncio.sleep(0.01)
    assert generator.asked == [], "weights change now, and a request under the old salt would find old keys and values"
    gate.resume(2)
    await making
    assert [salt for salt, _, _ in generator.asked] == ["v2"]


async def test_a_gate_that_is_open_to_the_end_holds_nobody_up_though_it_is_paused_again() -> None:
    gate = RequestGate(ServingEngines([]))
    waiting = asyncio.create_task(gate.opened())
    await asyncio.sleep(0)
    gate.open_to_end()
    gate.pause()
    await asyncio.wait_for(waiting, 5)


async def test_without_salts_requests_of_all_versions_share_the_cache() -> None:
    gate, generator = RequestGate(ServingEngines([])), Listening()
    gate.resume(1)
    await maker_of(gate, generator, salt=False).make(fresh())
    assert generator.asked[0][0] is None


async def test_a_record_may_change_what_belongs_to_a_sample_and_nothing_of_the_policy() -> None:
    gate, generator = RequestGate(ServingEngines([])), Listening()
    gate.resume(1)
    maker = maker_of(gate, generator)
    await maker.make(fresh(metadata={"sampling_params": {"max_new_tokens": 5, "stop": ["x", "y"]}}))
    assert generator.asked[0][1] == SamplingSettings(5, temperature=0.7, stop=("x", "y"))
    for params, message in [
        ({"temperature": 1.0}, r"temperature 1\.0, allowed in training: 0\.7"),
        ({"max_tokens": 5}, "sampling_params has max_tokens, allowed: max_new_tokens"),
        ({"max_new_tokens": "5"}, "Expected `int`, got `str`"),
    ]:
        with pytest.raises(SampleError, match=message) as error:
            await maker.make(fresh(metadata={"sampling_params": params}))
        assert error.value.reason == "sampling_params"
    await maker.make(fresh(metadata={"sampling_params": {"temperature": 1.0}}), evaluation=True)
    assert generator.asked[-1][1].temperature == 1.0


async def test_evaluation_has_sampling_of_its_own_and_asks_no_teacher() -> None:
    gate, generator = RequestGate(ServingEngines([])), Listening()
    gate.resume(1)
    (sample,) = await maker_of(gate, generator).make(fresh(), sampling=SamplingSettings(7), evaluation=True)
    assert generator.asked == [("v1", SamplingSettings(7), True)]
    assert sample.teacher_log_probs is None
    (trained,) = await maker_of(gate, generator).make(fresh())
    assert trained.teacher_log_probs == [-1.0, -1.0]


async def test_a_finished_sample_is_scored_and_not_generated_again() -> None:
    gate, generator = RequestGate(ServingEngines([])), Listening()
    gate.resume(1)
    finished = fresh(tokens=[1, 2], response_length=1, status=Sample.Status.COMPLETED)
    assert [sample.reward for sample in await maker_of(gate, generator).make(finished)] == [1.0]
    assert generator.asked == []


async def test_a_failed_reward_is_raised_with_its_reason() -> None:
    async def none(args: Any, sample: Sample) -> Any:  # noqa: ARG001
        return None

    gate = RequestGate(ServingEngines([]))
    gate.resume(1)
    with pytest.raises(RewardError) as error:
        await maker_of(gate, Listening(), reward=none).make(fresh())
    assert error.value.reason == "reward_none"
