"""An engine that outlived its driver is made usable by the next one, and sleeps where a trainer shares its memory."""

from __future__ import annotations

import pytest

from pipeline.takeover import make_usable
from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import NO_COLUMNS
from vime.errors import EngineError


@pytest.mark.parametrize("left", [{"weights", "kv_cache"}, {"kv_cache"}, set()])
async def test_an_engine_that_shares_a_trainers_memory_has_sampled_and_sleeps_however_it_was_left(
    left: set[str],
) -> None:
    with StandinEngine() as engine:
        engine.asleep, engine.version = set(left), "4"
        assert await make_usable(engine.address, NO_COLUMNS, sleeps=True) == 4
        assert engine.num_served == 1
        assert engine.asleep == {"weights", "kv_cache"}


async def test_an_engine_on_devices_of_its_own_goes_on_awake_though_it_was_left_paused() -> None:
    with StandinEngine() as engine:
        engine.version = "4"
        async with EngineClient(engine.address) as client:
            await client.pause("keep")
        assert await make_usable(engine.address, NO_COLUMNS, sleeps=False) == 4
        assert engine.num_served == 1
        assert not engine.asleep
        assert not engine.is_paused


async def test_an_engine_that_does_not_wake_can_not_be_used() -> None:
    with StandinEngine() as engine:
        engine.asleep = {"kv_cache"}
        engine.faults.steps["/wake_up"] = "error"
        with pytest.raises(EngineError, match="POST /wake_up answered 500"):
            await make_usable(engine.address, NO_COLUMNS, sleeps=True)
