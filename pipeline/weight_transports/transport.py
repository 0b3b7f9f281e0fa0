"""What the publisher asks of a weight transport. A new transport is one class with these four methods."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from vime.backends.vllm_utils.client import EngineClient
from vime.errors import EngineError, PublicationError

_Result = TypeVar("_Result")

CONTROL_SHARE = 0.1
"""Part of the time left that a call without much work may take."""
WORK_SHARE = 0.5
"""Part of the time left that fetching or loading weights may take."""

_POLL_S = 0.05

Failures = dict[str, str]
"""Address of an engine -> what went wrong with it."""


class Deadline:
    """The moment by which a publication must be over."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._end = timeout_s, time.monotonic() + timeout_s

    def left_s(self, share: float = 1.0) -> float:
        """Seconds left, or a share of them; never negative."""
        return max(0.0, self._end - time.monotonic()) * share

    async def bound(self, doing: str, work: Awaitable[_Result], *, at_most_s: float | None = None) -> _Result:
        """Await `work`; raises `PublicationError` naming it when the time is over, or when it fails with an engine."""
        seconds = self.left_s() if at_most_s is None else min(at_most_s, self.left_s())
        try:
            return await asyncio.wait_for(work, seconds)
        except TimeoutError as error:
            raise PublicationError(
                f"{doing} took longer than {seconds:.3g} s of the {self._timeout_s:g} s of --update-weight-timeout.",
                next_step="Look at the engine's log.",
            ) from error
        except PublicationError:
            raise
        except EngineError as error:
            raise PublicationError(f"{doing}: {error.message}", next_step=error.next_step) from error


@dataclass(frozen=True)
class Prepared:
    """A version is ready to be loaded, but for the engines in `failures`."""

    failures: Failures = field(default_factory=dict)
    wire_bytes: int = 0
    """Bytes sent or written."""
    density: float = 1.0
    """Share of the weights' bytes that travelled as changed."""


class WeightTransport(Protocol):
    """Every method is bounded by the deadline, or by its caller."""

    async def prepare(
        self, version: int, engines: Sequence[EngineClient], *, full: bool, deadline: Deadline
    ) -> Prepared:
        """What can be done while the engines sample on: gather, write, send, verify.

        No model is touched. `full` asks for a version that doesn't build on what the engines hold. Raises
        `PublicationError` when the version can't be made at all.
        """
        ...

    async def load(self, version: int, engines: Sequence[EngineClient], deadline: Deadline) -> Failures:
        """Change the models of paused engines, whose updates are open."""
        ...

    def repeats(self, version: int) -> bool:
        """Whether `prepare` can bring this version, the last that was published, to further engines.

        The trainer may have to hold its weights still.
        """
        ...

    async def finished(self, version: int, *, published: bool) -> None:
        """The publication is over; what it left may be cleaned up."""
        ...


def failures_of(error: PublicationError, engines: Sequence[EngineClient]) -> Failures:
    """The engines that the error names, or all of them when it names none."""
    return error.engines or {engine.address: error.message for engine in engines}


async def on_each(
    engines: Sequence[EngineClient],
    doing: str,
    calls: Sequence[Awaitable[object]],
    deadline: Deadline,
    *,
    share: float = CONTROL_SHARE,
) -> Failures:
    """One call for each engine, at once; the engines whose call failed or took more than a share of the time left.

    So an engine that hangs leaves the others time for what is still to be done.
    """
    seconds = deadline.left_s(share)
    steps = [
        deadline.bound(f"{doing} {engine.address}", call, at_most_s=seconds)
        for engine, call in zip(engines, calls, strict=True)
    ]
    outcomes = await asyncio.gather(*steps, return_exceptions=True)
    failures: Failures = {}
    for engine, outcome in zip(engines, outcomes, strict=True):
        if isinstance(outcome, PublicationError):
            failures[engine.address] = outcome.message
        elif isinstance(outcome, BaseException):
            raise outcome
    return failures


async def all_are_there(engines: Sequence[EngineClient], failures: Failures, deadline: Deadline) -> bool:
    """Whether all engines that failed still answer: then they lack something, and have not ended or left the others."""
    failed = [engine for engine in engines if engine.address in failures]
    return not await on_each(failed, "asking", [engine.weight_version() for engine in failed], deadline)


async def staged(engine: EngineClient, version: int) -> None:
    """Until all workers of the engine have the version; `PublicationError` has the reason of one that failed."""
    while True:
        workers = await engine.staging()
        for worker in workers:
            if worker.version != version or worker.state == "failed":
                raise PublicationError(worker.reason or f"version {worker.version} is staged, expected {version}")
        if all(worker.state == "staged" for worker in workers):
            return
        await asyncio.sleep(_POLL_S)
