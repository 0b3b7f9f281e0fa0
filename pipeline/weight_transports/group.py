"""Weights through a process group: gloo between processes of CPUs, NCCL between GPUs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Protocol

from pipeline.weight_transports.transport import (
    WORK_SHARE,
    Deadline,
    Failures,
    Prepared,
    all_are_there,
    failures_of,
    on_each,
    staged,
)
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.updates import FromGroup, LoadStaged, LoadStream
from vime.errors import PublicationError

WAIT_SHARE = 0.3
"""Part of a publication's time that sender and engines wait for each other: enough is left to go on without one."""


class GroupSource(Protocol):
    """The trainer's side."""

    async def open_sender(self, engine_names: list[str], timeout_s: float) -> list[dict[str, object]]:
        """Listen for workers, each named by its engine, after closing an earlier group; what each needs to join."""
        ...

    async def connect_sender(self) -> None:
        """Until all have joined; `PublicationError` names those that have not."""
        ...

    async def send_weights(self) -> int:
        """Until all engines have the trainer's weights, verified; bytes sent. `PublicationError` names the others."""
        ...


class GroupTransport:
    """Keeps one group of trainer and engines, and makes a new one when it broke or its engines changed."""

    def __init__(
        self, source: GroupSource, *, streams: bool, timeout_s: float, streams_after_failure: bool = False
    ) -> None:
        """With `streams` engines load weights as they arrive, while they are paused.

        Else they receive them whole before, beside the model: in host memory over gloo, on the GPU over NCCL. With
        `streams_after_failure` a version that engines could not take there, for want of memory say, is the last one
        that is tried so; one that an engine did not live to take is not.
        """
        self._source, self._streams = source, streams
        self._streams_after_failure = streams_after_failure
        self._wait_s = timeout_s * WAIT_SHARE
        self._joined: list[str] | None = None

    async def prepare(
        self,
        version: int,
        engines: Sequence[EngineClient],
        *,
        full: bool,
        deadline: Deadline,
    ) -> Prepared:
        """Join whoever isn't, and send the weights to where they wait beside the models.

        What a group sends is always whole; `full` makes a new group, since an engine may be a new process.
        """
        if full:
            self.leave()
        if [engine.address for engine in engines] != self._joined:
            failures = await self._join(engines, deadline)
            if failures:
                return Prepared(failures)
        if self._streams:
            return Prepared()
        failures = await on_each(
            engines, "staging on", [engine.stage_weights(FromGroup(version)) for engine in engines], deadline
        )
        if failures:
            # The group sends to all or to none.
            await self._could_not_stage(engines, failures, deadline)
            return Prepared(failures)
        try:
            num_bytes = await deadline.bound("sending weights", self._source.send_weights())
        except PublicationError as error:
            failures = failures_of(error, engines)
            await self._could_not_stage(engines, failures, deadline)
            # Those that aren't named may have the whole version, or have been left in the middle of it.
            others = [engine for engine in engines if engine.address not in failures]
            waits = [staged(engine, version) for engine in others]
            return Prepared(failures | await on_each(others, "staging on", waits, deadline))
        return Prepared(wire_bytes=num_bytes)

    async def load(self, version: int, engines: Sequence[EngineClient], deadline: Deadline) -> Failures:
        """What lies beside the model, or what arrives."""
        if not self._streams:
            loads = [engine.update_weights(LoadStaged(version)) for engine in engines]
            return await on_each(engines, "loading on", loads, deadline, share=WORK_SHARE)
        if [engine.address for engine in engines] != self._joined:
            return dict.fromkeys((engine.address for engine in engines), "the group has lost an engine")
        sending = asyncio.create_task(self._source.send_weights())
        loads = [engine.update_weights(LoadStream(version)) for engine in engines]
        failures = await on_each(engines, "loading on", loads, deadline, share=WORK_SHARE)
        try:
            await deadline.bound("sending weights", sending)
        except PublicationError as error:
            failures = failures_of(error, engines) | failures
        if failures:
            self.leave()
        return failures

    def leave(self) -> None:
        """Make a new group for the next publication."""
        self._joined = None

    async def _could_not_stage(self, engines: Sequence[EngineClient], failures: Failures, deadline: Deadline) -> None:
        self.leave()
        if self._streams_after_failure and await all_are_there(engines, failures, deadline):
            self._streams = True

    def repeats(self, version: int) -> bool:  # noqa: ARG002
        """The trainer's memory holds it."""
        return True

    async def finished(self, version: int, *, published: bool) -> None:
        """Nothing is left to clean up."""

    async def _join(self, engines: Sequence[EngineClient], deadline: Deadline) -> Failures:
        self.leave()
        names = [engine.address for engine in engines]
        try:
            asking = asyncio.gather(*(engine.world_size() for engine in engines))
            sizes = await deadline.bound("counting the engines' workers", asking)
            workers = [name for name, size in zip(names, sizes, strict=True) for _ in range(size)]
            opening = self._source.open_sender(workers, min(self._wait_s, deadline.left_s(WAIT_SHARE)))
            joining = await deadline.bound("opening the weight sender", opening)
            first_worker = itertools.accumulate(sizes, initial=0)
            inits = [
                engine.init_weight_transfer(joining[number])
                for engine, number in zip(engines, first_worker, strict=False)
            ]
            failures = await on_each(engines, "joining", inits, deadline)
            if failures:
                return failures
            await deadline.bound("connecting", self._source.connect_sender())
        except PublicationError as error:
            return failures_of(error, engines)
        self._joined = names
        return {}
