"""A cache counts as forgotten when the engine says so, not when it answers."""

from __future__ import annotations

import pytest

from tests.pipeline.publication_rig import Rig
from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import EngineError

NAMES = frozenset({"a", "b"})


async def test_a_reset_that_the_engine_did_not_do_is_an_error_not_a_success() -> None:
    with StandinEngine() as engine:
        async with EngineClient(engine.address) as client:
            await client.reset_prefix_cache()
            engine.faults.keeps_cache = True
            with pytest.raises(EngineError, match=f"{engine.address} could not drop its prefix cache within 0 s"):
                await client.reset_prefix_cache(timeout_s=0.0)


async def test_an_engine_that_keeps_its_cache_through_a_flush_is_fenced_and_named() -> None:
    with StandinEngine(required_names=NAMES) as first, StandinEngine(required_names=NAMES) as second:
        async with Rig([first, second], flush_interval=1, timeout_s=6.0) as rig:
            await rig.publish()
            second.faults.keeps_cache = True
            publication = await rig.publish()
            assert publication.raised
            assert list(publication.fenced) == [second.address]
            assert "dropping the cache of" in publication.fenced[second.address]
            await rig.check_standing()
            second.faults.keeps_cache = False
            assert (await rig.publish()).fenced == {}
            await rig.check_standing()
