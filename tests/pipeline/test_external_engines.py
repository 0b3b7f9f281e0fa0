"""Engines of others: found, checked, published to, and never stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pipeline import external_engines
from pipeline.engine_health import EngineKeeper, HealthSettings
from pipeline.external_engines import ExternalEngine, check_external, registered_engines
from pipeline.routers import Routers
from pipeline.run_folder import RunFolder
from tests.pipeline.publication_rig import Rig
from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.protocol import NO_COLUMNS, SampleColumns
from vime.backends.vllm_utils.router_server import RouterWorkers
from vime.errors import EngineStartError
from vime.settings.groups import Settings
from vime.settings.parse import parse_settings
from vime.settings.rules.quantities import demand_of, engines_are_others, num_own_engines


def settings(words: str) -> Settings:
    return parse_settings(words.split())


@pytest.mark.parametrize("words", ["--rollout-external-engine-addrs a:1 b:2", "--rollout-num-gpus 0"])
def test_no_engine_is_started_beside_those_of_others(words: str) -> None:
    given = settings(words)
    assert engines_are_others(given)
    assert num_own_engines(given) == 0
    assert demand_of(given).engines == ()


def test_records_need_no_engine_of_anybody() -> None:
    assert not engines_are_others(settings("--loss-type sft_loss --rollout-num-gpus 0"))


async def test_a_usable_engine_passes_and_one_that_was_left_paused_goes_on(engine: StandinEngine) -> None:
    async with Rig([engine]) as rig:
        await rig.clients[0].pause("keep")
        await check_external([engine.address], SampleColumns(num_candidates=4))
        assert not engine.is_paused


async def test_an_engine_without_the_plug_in_is_refused(engine: StandinEngine) -> None:
    engine.has_columns = False
    with pytest.raises(EngineStartError, match=rf"{engine.address} .* runs without vime's plug-in\. Start it as"):
        await check_external([engine.address], NO_COLUMNS)


async def test_an_engine_that_cannot_return_what_training_needs_is_refused(engine: StandinEngine) -> None:
    with pytest.raises(EngineStartError, match="can't return 999 candidates"):
        await check_external([engine.address], SampleColumns(num_candidates=999))


async def test_an_address_where_nobody_answers_is_refused() -> None:
    with pytest.raises(EngineStartError, match=r"http://127\.0\.0\.1:1, which someone else started, can't be used"):
        await check_external(["http://127.0.0.1:1"], NO_COLUMNS)


async def test_the_wait_for_engines_is_reported_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_engines, "_POLL_S", 0.01)
    found: list[str] = []
    said: list[str] = []

    async def addresses() -> list[str]:
        return found

    waiting = asyncio.create_task(registered_engines(addresses, "h:1", said.append))
    await asyncio.sleep(0.05)
    assert "waiting 0 s for engines to be registered with the router at h:1" in said
    found.append("http://e")
    assert await waiting == ["http://e"]
    found.clear()
    monkeypatch.setattr(external_engines, "WAIT_S", 0.0)
    with pytest.raises(EngineStartError, match=r"No engine was registered .* POST http://h:1/add_worker"):
        await registered_engines(addresses, "h:1", said.append)


@pytest.mark.multiproc
async def test_registered_engines_serve_only_with_the_runs_weights(tmp_path: Path, engine: StandinEngine) -> None:
    given = settings(f"--save {tmp_path} --rollout-num-gpus 0")
    notes: list[str] = []
    routers = Routers(given, RunFolder.of(given), notes.append, lambda: asyncio.sleep(0))
    await routers.start(["default"], "127.0.0.1")
    (router,) = routers.of_models
    workers = RouterWorkers(router.host, router.port)
    try:
        assert await workers.set([engine.address], []) == []
        assert await routers.registered("default", notes.append) == [engine.address]
        await routers.set("default", [engine.address], [])
        assert await workers.addresses() == [], "it has confirmed no version yet"
        with StandinEngine() as late:
            await workers.set([late.address], [])
            await routers.set("default", [engine.address], [engine.address])
            assert await workers.addresses() == [engine.address]
            assert notes == [
                f"Engine {late.address} was registered after the run began, without its weights: taken out."
            ]
    finally:
        await workers.close()
        await routers.stop()


async def test_an_engine_of_others_that_fails_is_fenced_until_it_answers_again(
    engine: StandinEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_engines, "_POLL_S", 0.01)
    async with Rig([engine]) as rig:
        await rig.publish()
        kept = [ExternalEngine(0, engine.address)]
        keeper = EngineKeeper(kept, HealthSettings(60.0, 1.0, 60.0), lambda _: None)
        running = asyncio.create_task(keeper.run(rig.publisher))
        engine.faults.dead = True
        keeper.suspect(engine.address)
        while engine.address not in rig.publisher.fenced:
            await asyncio.sleep(0.01)
        assert rig.admission.serving == []
        engine.start_anew()
        await asyncio.wait_for(rig.publisher.someone_is_behind(), 10)
        assert (await rig.publisher.catch_up()).returned == [engine.address]
        await rig.check_standing()
        running.cancel()
