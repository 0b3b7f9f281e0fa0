"""Engines that others started: found, checked, and used without ever being stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.engine_needs import check_engine
from vime.backends.vllm_utils.protocol import SampleColumns
from vime.errors import EngineError, EngineStartError

WAIT_S = 600.0
"""How long a run waits for the first engine to be registered with its router, and for one that is gone to return."""
CHECK_S = 60.0
_POLL_S = 1.0


async def registered_engines(
    addresses: Callable[[], Awaitable[list[str]]], router: str, report: Callable[[str], None]
) -> list[str]:
    """Base URLs of the workers of the run's router, once there is one; `report` is told of the wait.

    Raises:
        EngineStartError: none was registered within `WAIT_S`.
    """
    started = time.monotonic()
    while not (found := await addresses()):
        waited_s = time.monotonic() - started
        if waited_s > WAIT_S:
            raise EngineStartError(
                f"No engine was registered with the router at {router} within {WAIT_S:g} s.",
                next_step=f"Register engines with POST http://{router}/add_worker?url=http://HOST:PORT, or give "
                "--rollout-num-gpus a number above 0.",
            )
        report(f"waiting {waited_s:.0f} s for engines to be registered with the router at {router}")
        await asyncio.sleep(_POLL_S)
    return sorted(found)


async def check_external(addresses: Sequence[str], needs: SampleColumns) -> None:
    """Raise `EngineStartError` unless every engine answers, runs vime's plug-in, and can do what the run needs."""
    await asyncio.gather(*(_check(address, needs) for address in addresses))


async def _check(address: str, needs: SampleColumns) -> None:
    async with EngineClient(address) as client:
        try:
            can = await client.capabilities()
            if can.columns:
                # The start of an engine includes the plug-in's test against vLLM's own routes: this one has passed it.
                check_engine(address, can, needs)
                await client.resume()  # a run that was killed may have left it paused
                await client.check(CHECK_S)
        except EngineStartError:
            raise
        except EngineError as error:
            raise EngineStartError(
                f"Engine {address}, which someone else started, can't be used: {error.message}",
                next_step="Check that it runs and that its address is right.",
            ) from error
    missing = [
        what for what, there in (("vime's plug-in", can.columns), ("weight updates", can.weight_transfer)) if not there
    ]
    if missing:
        raise EngineStartError(
            f"Engine {address} (vLLM {can.engine_version}) runs without {' and without '.join(missing)}.",
            next_step="Start it as docs/engines.md shows: with vime installed, VLLM_PLUGINS=vime and "
            "VLLM_SERVER_DEV_MODE=1.",
        )


class ExternalEngine:
    """An engine as `pipeline.engine_health` keeps it: whoever owns it starts it again."""

    def __init__(self, number: int, address: str) -> None:
        self.name, self.address = f"engine {number}", address

    async def ended(self) -> str:
        """Never returns: its process is not known here."""
        await asyncio.Event().wait()
        raise AssertionError("an event that nobody sets")

    async def check(self, timeout_s: float) -> None:
        """Return when the engine has sampled a token; raises `EngineError` when it doesn't within `timeout_s`."""
        async with EngineClient(self.address) as client:
            await client.check(timeout_s)

    async def stop(self) -> None:
        """Nothing: whoever owns it ends it."""

    async def restart(self) -> None:
        """Wait until the engine answers again; raises `EngineStartError` when it doesn't within `WAIT_S`."""
        deadline = time.monotonic() + WAIT_S
        async with EngineClient(self.address) as client:
            while not await client.ready():
                if time.monotonic() > deadline:
                    raise EngineStartError(f"{self.name} ({self.address}) did not answer again within {WAIT_S:g} s.")
                await asyncio.sleep(_POLL_S)
