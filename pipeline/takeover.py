"""What an engine must show before a driver takes it over from one that is gone."""

from __future__ import annotations

import asyncio

from pipeline.sleeping_engine import put_to_sleep
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.engine_needs import check_engine
from vime.backends.vllm_utils.protocol import SampleColumns

USABLE_S = 60.0
"""How long it may take to be usable again."""


async def make_usable(address: str, needs: SampleColumns, *, sleeps: bool) -> int:
    """End what an engine does for a driver that is gone, and have it sample a token; the version of its weights.

    With `sleeps` it may have been left asleep, in whole or in part, and is asleep afterwards: what comes next is the
    trainer's start.

    Raises:
        EngineError: it can't be used.
        TimeoutError: it was not usable within `USABLE_S`.
    """
    async with asyncio.timeout(USABLE_S), EngineClient(address) as client:
        check_engine(address, await client.capabilities(), needs, sleeps=sleeps)
        await client.abort_all()
        if sleeps:
            await client.wake_up([])
        await client.resume()
        await client.check(USABLE_S)
        if sleeps:
            await put_to_sleep(client)
        return await client.weight_version()
