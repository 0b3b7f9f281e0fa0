"""Publications that change weights between two steps: requests go on, labels fit, and whatever fails is known."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.publication_rig import Rig, is_running, outcome, two_engines
from tests.support.standin_engine import Misbehaviour, StandinEngine
from vime.backends.vllm_utils.wire_columns import SWAP


@pytest.fixture(autouse=True)
def short_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.engine_update.SETTLE_S", 0.3)


@pytest.fixture
def engines() -> Iterator[list[StandinEngine]]:
    with two_engines(step_s=0.005) as engines:
        for engine in engines:
            engine.swaps = True
        yield engines


def forbid_halts(engine: StandinEngine) -> None:
    for step in ("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"):
        engine.faults.steps[step] = "error"


@pytest.mark.parametrize("on_disk", [False, True])
async def test_kept_requests_go_on_through_a_publication_without_a_halt(
    engines: list[StandinEngine], tmp_path: Path, on_disk: bool
) -> None:
    async with Rig(engines, folder=tmp_path if on_disk else None) as rig:
        await rig.publish()
        running = [rig.generate(0), rig.generate(1)]
        await asyncio.gather(is_running(rig, 0), is_running(rig, 1))
        for engine in engines:
            forbid_halts(engine)
        engines[0].swap_seconds, engines[1].swap_seconds = [None, 0.003], [0.002]
        publication = await rig.publish()
        assert (publication.raised, publication.fenced, publication.pause_s) == (True, {}, 0.003)
        assert publication.change_s > 0
        for number, task in enumerate(running):
            result = await task
            assert [span.version for span in result.version_spans] == [1, 2]
            rig.check_labels(number, result)
        await rig.check_standing()
        assert rig.admission.said[-2:] == ["pause", "resume 2"]


async def test_a_publication_that_flushes_halts_engines_all_the_same(engines: list[StandinEngine]) -> None:
    async with Rig(engines, flush_interval=1) as rig:
        await rig.publish()
        await rig.publish()
    assert engines[0].events == ["load", "load"]


async def test_weights_that_arrive_in_the_pause_are_not_swapped(engines: list[StandinEngine]) -> None:
    async with Rig(engines, streams=True) as rig:
        await rig.publish()
        assert (await rig.publish()).raised
    assert engines[0].events == ["load", "load"]


async def test_an_engine_that_needs_a_halt_gets_one_while_the_other_swaps(engines: list[StandinEngine]) -> None:
    engines[1].swaps = False
    async with Rig(engines) as rig:
        await rig.publish()
        publication = await rig.publish()
        await rig.check_standing()
    assert [engine.events for engine in engines] == [["load", "swap"], ["load", "load"]]
    assert publication.pause_s == publication.change_s


@pytest.mark.parametrize("behaviour", ["hang", "error", "error after", "die"])
async def test_an_engine_that_fails_to_swap_is_known_or_fenced_and_repaired_by_the_next_publication(
    engines: list[StandinEngine], behaviour: Misbehaviour
) -> None:
    async with Rig(engines, timeout_s=6.0 if behaviour == "hang" else 20.0) as rig:
        await rig.publish()
        running = [rig.generate(0), rig.generate(1)]
        await asyncio.gather(is_running(rig, 0), is_running(rig, 1))
        engines[1].faults.steps[SWAP] = behaviour
        publication = await rig.publish()
        await rig.check_standing()
        assert publication.raised
        assert bool(publication.fenced) == (behaviour != "error after")
        rig.check_labels(0, await running[0])
        if (result := await outcome(running[1])) is not None:
            rig.check_labels(1, result)
        if behaviour == "die":
            engines[1].start_anew()
        engines[1].faults.steps.clear()
        repaired = await rig.publish()
        assert (repaired.raised, repaired.fenced) == (True, {})
        await rig.check_standing()


async def test_an_engine_that_a_swap_has_left_with_a_mix_samples_no_token_before_it_is_repaired(
    engines: list[StandinEngine],
) -> None:
    async with Rig(engines) as rig:
        await rig.publish()
        running = rig.generate(1)
        await is_running(rig, 1)
        engines[1].faults.num_failed_updates = 1
        publication = await rig.publish()
        assert set(publication.fenced) == {engines[1].address}
        assert engines[1].is_paused
        result = await outcome(running)
        if result is not None:
            assert [span.version for span in result.version_spans] == [1]
            rig.check_labels(1, result)
        assert (await rig.publish()).fenced == {}
        assert engines[1].events[-1] == "load"
        assert not engines[1].is_paused


async def test_the_call_is_the_pause_where_an_engine_does_not_tell_it(engines: list[StandinEngine]) -> None:
    async with Rig(engines[:1]) as rig:
        await rig.publish()
        engines[0].faults.steps[SWAP] = "error after"
        publication = await rig.publish()
    assert publication.raised
    assert publication.pause_s == publication.change_s
