"""Publishes weights into running engines; an engine ends on the new version, on the old one, or fenced."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.flush import publication_flushes
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import EngineError, PublicationError

logger = logging.getLogger(__name__)


class WeightSource(Protocol):
    """The trainer's side of a publication."""

    async def open_sender(self, engine_names: list[str]) -> list[dict[str, object]]: ...
    async def connect_sender(self) -> None: ...
    async def send_weights(self) -> int: ...


class Admission(Protocol):
    """The producers' side: no new request starts while weights change."""

    async def pause_admission(self) -> None: ...
    async def resume_admission(self, policy_version: int) -> None: ...


@dataclass(frozen=True)
class Publication:
    """What one publication did."""

    version: int
    flushed: bool
    num_bytes: int
    pause_s: float
    """How long the engines stood still."""


class WeightPublisher:
    """Holds the policy version; it only goes up."""

    def __init__(
        self,
        engines: Sequence[EngineClient],
        source: WeightSource,
        admission: Admission,
        *,
        start_version: int,
        flush_interval: int,
        timeout_s: float,
    ) -> None:
        self._engines, self._source, self._admission = engines, source, admission
        self._start_version, self._flush_interval, self._timeout_s = start_version, flush_interval, timeout_s
        self.version = start_version

    async def connect(self) -> None:
        """Join trainer and engines in one transfer group; nothing to do without engines."""
        if not self._engines:
            return
        joining = await self._source.open_sender([engine.address for engine in self._engines])
        await self._bounded(
            "connecting",
            self._source.connect_sender(),
            *(engine.init_weight_transfer(info) for engine, info in zip(self._engines, joining, strict=True)),
        )

    async def publish(self) -> Publication:
        """Publish the trainer's weights as the next version; without engines it is only counted.

        Raises:
            PublicationError: an engine did not confirm. Every engine is either resumed on the old version (nothing
                had been changed yet) or left paused for good, because its weights are in doubt; the run must stop.
        """
        version = self.version + 1
        if not self._engines:
            self.version = version
            await self._admission.resume_admission(version)
            return Publication(version, False, 0, 0.0)
        flushes = publication_flushes(version, self._start_version, self._flush_interval)
        await self._admission.pause_admission()
        paused_at = time.monotonic()
        await self._pause(flushes)
        num_bytes = await self._transfer(version)
        confirmed = await self._bounded("confirming", *(engine.weight_version() for engine in self._engines))
        for engine, found in zip(self._engines, confirmed, strict=True):
            if found != version:
                raise PublicationError(
                    f"{engine.address} reports weight version {found!r} after the publication of {version}.",
                    next_step="Resume the run; it publishes anew.",
                )
        await self._bounded("resuming", *(engine.resume() for engine in self._engines))
        pause_s = time.monotonic() - paused_at
        self.version = version
        await self._admission.resume_admission(version)
        return Publication(version, flushes, num_bytes, pause_s)

    async def _pause(self, flushes: bool) -> None:
        """Stop the engines; on failure let those that stopped go on with the old weights."""
        try:
            await self._bounded("pausing", *(engine.pause("abort" if flushes else "keep") for engine in self._engines))
            if flushes:
                await self._bounded("flushing", *(engine.reset_prefix_cache() for engine in self._engines))
        except PublicationError:
            for engine in self._engines:
                try:
                    await engine.resume()
                except EngineError as error:
                    logger.error("%s can't be resumed: %s", engine.address, error)
            await self._admission.resume_admission(self.version)
            raise

    async def _transfer(self, version: int) -> int:
        """Weights change from here on: a failure leaves the engines paused, so that none serves half of them."""
        await self._bounded("starting the update", *(engine.start_weight_update() for engine in self._engines))
        num_bytes, *_ = await self._bounded(
            "transferring weights",
            self._source.send_weights(),
            *(engine.update_weights({}) for engine in self._engines),
        )
        await self._bounded("finishing the update", *(engine.finish_weight_update(version) for engine in self._engines))
        if not isinstance(num_bytes, int):
            raise PublicationError(f"the trainer reports {num_bytes!r} bytes sent, allowed: a number.")
        return num_bytes

    async def _bounded(self, doing: str, *steps: Awaitable[object]) -> list[object]:
        try:
            return list(await asyncio.wait_for(asyncio.gather(*steps), self._timeout_s))
        except TimeoutError as error:
            addresses = ", ".join(engine.address for engine in self._engines)
            raise PublicationError(
                f"{doing} took longer than {self._timeout_s:g} s (engines {addresses}).",
                next_step="Look at the engine's log, then resume the run.",
            ) from error
        except PublicationError:
            raise
        except EngineError as error:
            raise PublicationError(f"{doing}: {error.message}", next_step=error.next_step) from error
