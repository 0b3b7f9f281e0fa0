"""Weights in GPU memory that trainer and colocated engines share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeAlias

import msgspec

from pipeline.weight_transports.transport import (
    WORK_SHARE,
    Deadline,
    Failures,
    Prepared,
    all_are_there,
    on_each,
    staged,
)
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.updates import FromShared, LoadShared, LoadStaged
from vime.errors import PublicationError, VimeError

STOP_S = 10.0
"""Seconds for giving up a version whose time is over, or for which a process was waited that has ended."""

_TakePart: TypeAlias = Callable[[EngineClient, dict[str, object]], Awaitable[None]]


class SharingSource(Protocol):
    """The trainer's side."""

    async def share_next_part(self, version: int) -> dict[str, object] | None:
        """Put the next part of a version into the shared buffer; its description for the engines, None at the end."""
        ...

    async def stop_sharing(self) -> None:
        """Give up what is left of a version, and the buffer."""
        ...


class SharedTransport:
    """One buffer, filled and emptied in turns."""

    def __init__(self, source: SharingSource, *, stages: bool = False) -> None:
        """With `stages` engines copy a version beside their models while they sample.

        Else they load its parts as they come, while they are paused; so too after a version that could not be brought
        there, for want of memory say.
        """
        self._source, self._stages = source, stages
        self._beside: int | None = None
        """The version that was brought beside the models."""

    @property
    def stages(self) -> bool:
        return self._beside is not None

    async def prepare(
        self, version: int, engines: Sequence[EngineClient], *, full: bool, deadline: Deadline
    ) -> Prepared:
        """Copy the weights beside the models, where they fit; `full` shares them anew, for engines that are new."""
        if full:
            await deadline.bound("giving up the shared buffer", self._source.stop_sharing())
        self._beside = version if self._stages else None
        if not self._stages:
            return Prepared()
        failures, num_bytes = await self._stage(version, engines, deadline)
        if failures and await all_are_there(engines, failures, deadline):
            self._stages = False
        return Prepared(failures, num_bytes)

    async def load(self, version: int, engines: Sequence[EngineClient], deadline: Deadline) -> Failures:
        """What lies beside the models, or part by part."""
        if self._beside == version:
            loads = [engine.update_weights(LoadStaged(version)) for engine in engines]
            return await on_each(engines, "loading on", loads, deadline, share=WORK_SHARE)

        async def load_part(engine: EngineClient, part: dict[str, object]) -> None:
            await engine.update_weights(msgspec.convert(part, LoadShared))

        return (await self._pass_on(version, engines, "loading on", load_part, deadline))[0]

    def repeats(self, version: int) -> bool:  # noqa: ARG002
        """The trainer's memory holds it."""
        return True

    async def finished(self, version: int, *, published: bool) -> None:
        """Nothing is left to clean up."""

    async def _stage(self, version: int, engines: Sequence[EngineClient], deadline: Deadline) -> tuple[Failures, int]:
        async def stage_part(engine: EngineClient, part: dict[str, object]) -> None:
            await engine.stage_weights(msgspec.convert(part, FromShared))
            await staged(engine, version)

        return await self._pass_on(version, engines, "copying to", stage_part, deadline)

    async def _pass_on(
        self, version: int, engines: Sequence[EngineClient], doing: str, take: _TakePart, deadline: Deadline
    ) -> tuple[Failures, int]:
        """Have every engine take part after part; one that fails gets no more of them. Failures, and bytes shared."""
        failures: Failures = {}
        taking, num_bytes = list(engines), 0
        try:
            while taking and (part := await deadline.bound("sharing", self._source.share_next_part(version))):
                num_bytes += msgspec.convert(part, FromShared).num_bytes
                calls = [take(engine, part) for engine in taking]
                failures |= await on_each(taking, doing, calls, deadline, share=WORK_SHARE)
                taking = [engine for engine in taking if engine.address not in failures]
        except PublicationError as error:
            failures |= {engine.address: error.message for engine in taking}
        except asyncio.CancelledError:
            # The trainer's ranks still gather the version together, and can't train before its end.
            with suppress(TimeoutError, VimeError):
                await asyncio.wait_for(self._source.stop_sharing(), STOP_S)
            raise
        if failures:
            await self._source.stop_sharing()
        return failures, num_bytes
