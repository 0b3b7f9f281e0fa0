"""Weights in GPU memory that trainer and colocated engines share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from pipeline.weight_transports.transport import WORK_SHARE, Deadline, Failures, Prepared, on_each
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.updates import LoadShared
from vime.errors import PublicationError


class SharingSource(Protocol):
    """The trainer's side."""

    async def share_next_part(self, version: int) -> dict[str, object] | None:
        """Put the next part of a version into the shared buffer; the engines' update request, None at the end."""
        ...

    async def stop_sharing(self) -> None:
        """Give up what is left of a version, and the buffer."""
        ...


class SharedTransport:
    """One buffer, filled and loaded in turns."""

    def __init__(self, source: SharingSource) -> None:
        self._source = source

    async def prepare(
        self,
        version: int,  # noqa: ARG002
        engines: Sequence[EngineClient],  # noqa: ARG002
        *,
        full: bool,
        deadline: Deadline,
    ) -> Prepared:
        """The trainer's memory is where the weights are already; `full` shares it anew, for engines that are new."""
        if full:
            await deadline.bound("giving up the shared buffer", self._source.stop_sharing())
        return Prepared()

    async def load(self, version: int, engines: Sequence[EngineClient], deadline: Deadline) -> Failures:
        """Part by part; an engine that fails gets no more of them."""
        failures: Failures = {}
        loading = list(engines)
        try:
            while loading and (part := await deadline.bound("sharing", self._source.share_next_part(version))):
                update = msgspec.convert(part, LoadShared)
                failures |= await on_each(
                    loading, "loading on", [e.update_weights(update) for e in loading], deadline, share=WORK_SHARE
                )
                loading = [engine for engine in loading if engine.address not in failures]
        except PublicationError as error:
            failures |= {engine.address: error.message for engine in loading}
        if failures:
            await self._source.stop_sharing()
        return failures

    def repeats(self, version: int) -> bool:  # noqa: ARG002
        """The trainer's memory holds it."""
        return True

    async def finished(self, version: int, *, published: bool) -> None:
        """Nothing is left to clean up."""
