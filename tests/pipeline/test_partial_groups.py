"""Groups that come back unfinished: what their members keep, and what is made anew."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.group_maker import GroupMaker, UnfinishedGroup
from storage.checks import EnqueueRequirements
from storage.columns import decode_group
from storage.queue_types import Stage
from tests.pipeline.stream_parts import GROUP_SETTINGS, Parts, constant_reward, stream
from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.protocol import SampleColumns
from vime.errors import GenerationAborted
from vime.rollout.generate import SampleGenerator
from vime.rollout.sampling import SamplingSettings
from vime.utils.types import Sample

pytestmark = pytest.mark.usefixtures("quick_retries")

COLUMNS = SampleColumns(num_candidates=3, routes=True, nucleus=True)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Counter[int | None]:
    """How often each sample was sent to an engine."""
    counted: Counter[int | None] = Counter()
    generate = SampleGenerator.generate

    async def counting(self: SampleGenerator, engine: Any, sample: Sample, *args: Any, **options: Any) -> None:
        counted[sample.index] += 1
        await generate(self, engine, sample, *args, **options)

    monkeypatch.setattr(SampleGenerator, "generate", counting)
    return counted


class Noting:
    """In place of a sample maker: notes the tokens that it is to go on from, and aborts."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []

    async def make(self, sample: Sample) -> list[Sample]:
        self.tokens.append(sample.tokens)
        raise GenerationAborted("a version is published")


@pytest.mark.parametrize("continues", [False, True])
async def test_what_a_session_with_partial_rollout_left_is_made_anew_by_one_without(continues: bool) -> None:
    samples, settings = Noting(), replace(GROUP_SETTINGS, continues_aborted=continues)
    left = Sample(index=0, tokens=[1, 2, 3], response_length=1, version_spans=[(4, 2, 3)], status=Sample.Status.ABORTED)
    outcome = await GroupMaker(settings, samples, None).make([left])  # type: ignore[arg-type]
    assert isinstance(outcome, UnfinishedGroup)
    assert samples.tokens == [[1, 2, 3] if continues else []]
    assert outcome.has_responses is continues


async def accepted_samples(parts: Parts, count: int) -> list[Sample]:
    await parts.until_pending(count)
    groups = await parts.coordinator.wait_for_groups(count, 1) or []
    stored = [parts.pool.read_group(group.ref) for group in groups]
    return [sample for group in stored for sample in decode_group(group.header, group.columns)]


async def publish_while_all_run(parts: Parts, engine: StandinEngine, num_requests: int) -> None:
    """Abort all requests in their middle and go on under version 2."""
    while (await parts.client.metrics()).num_running < num_requests:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    parts.producer.gate.pause()
    await parts.client.pause("abort")
    engine.version = "2"
    await parts.client.resume()
    parts.producer.gate.resume(2)


async def test_without_partial_rollout_every_sample_has_one_version(tmp_path: Path, engine: StandinEngine) -> None:
    engine.faults.step_s = 0.01
    async with stream(tmp_path, engine, groups_wanted=2, response_tokens=60) as parts:
        await publish_while_all_run(parts, engine, 4)
        samples = await accepted_samples(parts, 2)
        assert [sample.version_spans for sample in samples] == [[(2, 0, 60)]] * 4
        assert [item.stage for item in parts.queue.yielded] == []


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("in_memory", [False, True])
async def test_with_partial_rollout_an_aborted_sample_goes_on_and_each_token_has_the_version_that_made_it(
    tmp_path: Path, engine: StandinEngine, in_memory: bool, masks: bool
) -> None:
    engine.faults.step_s = 0.01
    async with stream(
        tmp_path,
        engine,
        groups_wanted=2,
        response_tokens=60,
        columns=COLUMNS,
        in_memory=in_memory,
        continues_aborted=True,
        masks_continued=masks,
    ) as parts:
        await publish_while_all_run(parts, engine, 4)
        samples = await accepted_samples(parts, 2)
        assert {item.stage for item in parts.queue.yielded} == {Stage.PARTIAL}
        assert {item.min_version for item in parts.queue.yielded} == {1}
    for sample in samples:
        (first, start, cut), (second, resumed, stop) = sample.version_spans
        assert (first, start, second, resumed, stop) == (1, 0, 2, cut, 60)
        assert len(sample.rollout_log_probs or []) == 60
        assert [len(rows) for rows in (sample.rollout_topk_token_ids, sample.rollout_routed_experts)] == [
            60,
            len(sample.tokens) - 1,
        ]  # type: ignore[arg-type]
        assert len(sample.rollout_top_p_token_offsets) == 61  # type: ignore[arg-type]
        assert sample.mask_array().tolist() == [int(not masks)] * cut + [1] * (60 - cut)


async def test_only_members_that_failed_are_made_anew(
    tmp_path: Path, engine: StandinEngine, attempts: Counter[int | None]
) -> None:
    calls: Counter[int | None] = Counter()

    async def flaky(args: Any, sample: Sample) -> Any:
        calls[sample.index] += 1
        return None if sample.index == 1 and calls[1] < 3 else await constant_reward(args, sample)

    async with stream(tmp_path, engine, reward=flaky, groups_wanted=2, n_samples_per_prompt=4, max_attempts=4) as parts:
        samples = await accepted_samples(parts, 2)
    assert attempts == {index: 3 if index == 1 else 1 for index in range(8)}
    assert calls == attempts
    assert sorted(sample.index or 0 for sample in samples) == list(range(8))


class AbortedOnce:
    """Makes samples without an engine; the first attempt at sample 1 is aborted."""

    def __init__(self) -> None:
        self.attempts: Counter[int | None] = Counter()

    async def generate(self, engine: Any, sample: Sample, sampling: SamplingSettings, **_: Any) -> None:  # noqa: ARG002
        self.attempts[sample.index] += 1
        if sample.index == 1 and self.attempts[1] == 1:
            raise GenerationAborted("for the test")
        sample.tokens, sample.response_length, sample.loss_mask = [1, 2, 3, 4], 3, [1, 1, 1]
        sample.status = Sample.Status.COMPLETED


async def test_finished_members_are_kept_when_others_are_aborted(tmp_path: Path, engine: StandinEngine) -> None:
    generator, needs = AbortedOnce(), EnqueueRequirements(sampled=False)
    async with stream(tmp_path, engine, generator=generator, needs=needs, groups_wanted=2) as parts:
        samples = await accepted_samples(parts, 2)
    assert generator.attempts == {0: 1, 1: 2, 2: 1, 3: 1}
    assert sorted(sample.index or 0 for sample in samples) == [0, 1, 2, 3]


async def test_members_of_a_group_reward_that_are_finished_wait_for_the_aborted_ones_and_are_scored_once(
    tmp_path: Path, engine: StandinEngine, attempts: Counter[int | None]
) -> None:
    scored: list[int] = []

    async def reward(args: Any, samples: list[Sample]) -> list[float]:  # noqa: ARG001
        scored.append(len(samples))
        return [1.0] * len(samples)

    engine.faults.num_tokens_before_abort = 10
    async with stream(
        tmp_path, engine, group_reward=reward, groups_wanted=1, response_tokens=30, continues_aborted=True
    ) as parts:
        while not parts.producer.stats().groups_aborted:
            await asyncio.sleep(0.01)
        engine.faults.num_tokens_before_abort = None
        samples = await accepted_samples(parts, 1)
    assert scored == [2]
    assert [sample.response_length for sample in samples] == [30, 30]
    assert min(attempts.values()) > 1


async def test_many_publications_at_any_moment_lose_no_token_and_fail_no_request(
    tmp_path: Path, engine: StandinEngine
) -> None:
    engine.faults.step_s, moments = 0.002, random.Random(0)
    async with stream(
        tmp_path, engine, groups_wanted=12, max_groups=12, response_tokens=100, columns=COLUMNS, continues_aborted=True
    ) as parts:
        for version in range(2, 27):
            await asyncio.sleep(moments.random() * 0.03)
            parts.producer.gate.pause()
            await parts.client.pause("abort")
            engine.version = str(version)
            await parts.client.resume()
            parts.producer.gate.resume(version)
        samples = await accepted_samples(parts, 12)
        assert parts.producer.stats().failed_samples == {}
        assert parts.coordinator.counts().dropped == {}
    assert len(samples) == 24
    for sample in samples:
        stops = [0, *(stop for _, _, stop in sample.version_spans)]
        assert [(start, stop) for _, start, stop in sample.version_spans] == list(itertools.pairwise(stops))
        assert stops[-1] == 100
        versions = [version for version, _, _ in sample.version_spans]
        assert versions == sorted(set(versions))
    assert max(len(sample.version_spans) for sample in samples) > 2
