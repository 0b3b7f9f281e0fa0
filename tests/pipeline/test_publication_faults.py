"""An engine that hangs, fails or dies at any step of a publication: within the deadline every engine serves one known
version, or is fenced and named, and no sample carries a version that did not make it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.publication_rig import Rig, is_running, outcome, two_engines
from tests.support.standin_engine import Misbehaviour, StandinEngine

TIMEOUT_S = 6.0
SETTLE_S = 0.3
MARGIN_S = 10.0
"""For a machine that has other work: far less than without a deadline, where it would take for ever."""
GROUP_STEPS = [
    "/weight_info",
    "/init_weight_transfer_engine",
    "vime_stage_weights",
    "/pause",
    "/reset_prefix_cache",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/resume",
]
DISK_STEPS = ["vime_stage_weights", "vime_staging", "/update_weights", "/resume"]


@pytest.fixture(autouse=True)
def short_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.engine_update.SETTLE_S", SETTLE_S)


@pytest.fixture
def engines() -> Iterator[list[StandinEngine]]:
    with two_engines(step_s=0.005) as engines:
        yield engines


@pytest.mark.parametrize("step", ["/init_weight_transfer_engine", "vime_stage_weights"])
async def test_an_engine_that_cannot_take_part_costs_the_others_neither_version_nor_requests(
    engines: list[StandinEngine], step: str
) -> None:
    async with Rig(engines, timeout_s=TIMEOUT_S) as rig:
        await rig.publish()
        rig.forget_group()
        running = rig.generate(0)
        await is_running(rig, 0)
        engines[1].faults.steps[step] = "error"
        publication = await rig.publish()
        assert (publication.raised, set(publication.fenced)) == (True, {engines[1].address})
        result = await running
        assert (result.finish_reason, len(result.token_ids)) == ("length", 60)
        rig.check_labels(0, result)


async def publish_with_fault(rig: Rig, step: str, behaviour: Misbehaviour) -> None:
    """Publish once with requests in flight and the fault in the second engine, and check what must hold."""
    running = [rig.generate(0), rig.generate(1)]
    await asyncio.gather(is_running(rig, 0), is_running(rig, 1))
    rig.engines[1].faults.steps[step] = behaviour
    started = time.monotonic()
    publication = await rig.publish()
    assert time.monotonic() - started < TIMEOUT_S + 4 * SETTLE_S + MARGIN_S
    await rig.check_standing()
    assert publication.version == rig.publisher.version
    assert set(publication.fenced) | set(rig.admission.serving) == {engine.address for engine in rig.engines}
    rig.engines[1].faults.steps.clear()
    late = [rig.generate(number) for number in range(2) if rig.engines[number].address in rig.admission.serving]
    assert all([(await task).finish_reason == "length" for task in late])
    if rig.engines[1].is_paused:
        running[1].cancel()  # as a producer does with a fenced engine
    else:
        result = await outcome(running[1])
        if result is not None:
            rig.check_labels(1, result)
    rig.check_labels(0, await running[0])


@pytest.mark.parametrize("behaviour", ["hang", "error", "die"])
@pytest.mark.parametrize("step", GROUP_STEPS)
async def test_an_engine_that_misbehaves_is_fenced_and_the_next_publication_repairs_it(
    engines: list[StandinEngine], step: str, behaviour: Misbehaviour
) -> None:
    interval = 1 if step == "/reset_prefix_cache" else 0
    async with Rig(engines, flush_interval=interval, timeout_s=TIMEOUT_S) as rig:
        await rig.publish()
        if step == "/init_weight_transfer_engine":
            rig.forget_group()
        await publish_with_fault(rig, step, behaviour)
        publication = await rig.publish()
        assert publication.raised
        assert engines[0].address in rig.admission.serving
        assert (engines[1].address in publication.fenced) == engines[1].faults.dead
        await rig.check_standing()


@pytest.mark.parametrize(
    "step", ["/pause", "vime_stage_weights", "/update_weights", "/finish_weight_update", "/resume"]
)
async def test_an_answer_that_is_lost_after_the_work_was_done_leaves_no_engine_in_doubt(
    engines: list[StandinEngine], step: str
) -> None:
    async with Rig(engines, timeout_s=TIMEOUT_S) as rig:
        await rig.publish()
        await publish_with_fault(rig, step, "error after")
        assert not (await rig.publish()).fenced
        await rig.check_standing()


async def test_a_version_that_was_raised_although_its_answer_was_lost_counts(engines: list[StandinEngine]) -> None:
    async with Rig(engines, timeout_s=TIMEOUT_S) as rig:
        await rig.publish()
        for engine in engines:
            engine.faults.steps["/finish_weight_update"] = "error after"
        publication = await rig.publish()
        assert (publication.version, publication.raised, publication.fenced) == (2, True, {})
        await rig.check_standing()


@pytest.mark.parametrize("behaviour", ["hang", "error", "die"])
@pytest.mark.parametrize("step", DISK_STEPS)
async def test_an_engine_that_misbehaves_with_versions_on_disk_is_repaired_by_a_whole_version(
    engines: list[StandinEngine], tmp_path: Path, step: str, behaviour: Misbehaviour
) -> None:
    async with Rig(engines, timeout_s=TIMEOUT_S, folder=tmp_path) as rig:
        await rig.publish()
        await rig.publish()
        assert rig.source.written[-1] == (2, False)
        await publish_with_fault(rig, step, behaviour)
        before = len(rig.source.written)
        assert (await rig.publish()).raised
        assert rig.source.written[before][1], "the version after a failure is whole"
        await rig.check_standing()


async def test_a_stalled_engine_among_receivers_costs_only_itself(engines: list[StandinEngine]) -> None:
    """It has joined and been told to receive, but never does."""
    async with Rig(engines, timeout_s=TIMEOUT_S) as rig:
        await rig.publish()
        engines[1].faults.num_ignored_stagings = 1
        publication = await rig.publish()
        assert not publication.raised
        assert len(rig.admission.serving) == 2, "no model was touched"
        await rig.check_standing()
        assert (await rig.publish()).raised
        await rig.check_standing()


async def test_a_cancelled_publication_leaves_no_engine_paused(engines: list[StandinEngine]) -> None:
    async with Rig(engines, timeout_s=TIMEOUT_S) as rig:
        await rig.publish()
        engines[1].faults.steps["/start_weight_update"] = "hang"
        publishing = asyncio.create_task(rig.publish())
        while not engines[0].is_paused:
            await asyncio.sleep(0.01)
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        assert not engines[0].is_paused
        assert not engines[1].is_paused
