"""Groups for one rollout after another: leased, made, filtered, and those left over kept for the next."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vime.errors import FailedSampleError
from vime.rollout.dynamic_filter import DynamicFilter, rejection
from vime.rollout.filter_hub.base_types import DynamicFilterOutput
from vime.utils.types import Sample

Group = list[Sample]


@dataclass(frozen=True)
class Attempt:
    """What came of working on a group: finished members as they are, the others as the next attempt starts from."""

    samples: Group
    failure: str | None = None
    """The word that a failure is counted under."""
    gives_up: bool = False
    """It has failed too often to be tried again."""
    aborted: bool = False


class MakesGroups(Protocol):
    """What works on groups."""

    async def attempt(self, group: Group) -> Attempt: ...
    async def set_aside(self, group: Group, error: Exception) -> None: ...


class GroupSource(Protocol):
    """What groups come from and go back to; calls block."""

    def get_samples(self, num_samples: int) -> list[Group]: ...
    def add_samples(self, groups: Sequence[Group]) -> object: ...
    def drop_samples(self, groups: Sequence[Group], reason: str) -> None: ...


@dataclass
class Collected:
    """Groups of one rollout."""

    kept: list[Group] = field(default_factory=list)
    seen: list[Group] = field(default_factory=list)
    """Kept and rejected ones."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Reason -> groups."""


class GroupCollector:
    """Lives as long as the run. For one event loop."""

    def __init__(self, maker: MakesGroups, dynamic_filter: DynamicFilter, *, max_running: int) -> None:
        self._maker, self._filter = maker, dynamic_filter
        self.max_running = max_running
        """Groups that may be worked on at once."""
        self._running: set[asyncio.Task[Group | None]] = set()
        self._ended = False

    async def collect(self, source: GroupSource, count: int, *, pull: int, runs_ahead: bool = False) -> Collected:
        """`count` groups that the filter keeps, or fewer at the end of the prompts.

        Groups are taken `pull` at a time while those in work could not fill the rollout; with `runs_ahead` up to
        `max_running` are always in work. Those still in work at the end come first in the next rollout.
        """
        found, exhausted = Collected(), False
        while len(found.kept) < count and not self._ended:
            missing = count - len(found.kept) - len(self._running)
            room = self.max_running - len(self._running)
            wanted = room if runs_ahead else min(pull, room) if missing > 0 else 0
            if wanted > 0 and not exhausted:
                groups = await asyncio.to_thread(source.get_samples, wanted)
                exhausted = not groups
                self._running |= {asyncio.create_task(self._finished(source, group)) for group in groups}
            if not self._running:
                break
            done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=_order)[: count - len(found.kept)]:
                self._running.remove(task)
                group = None if task.cancelled() else task.result()
                if group is not None:
                    await self._judge(source, group, found, count, may_fall_back=not runs_ahead)
        return found

    def end(self) -> None:
        """End what is in work, and collect no more: a rollout that is being collected is cut short."""
        self._ended = True
        for task in self._running:
            task.cancel()

    async def close(self, source: GroupSource) -> None:
        """End what is in work; finished groups go back to the source as they are."""
        self.end()
        outcomes = await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()
        finished = [group for group in outcomes if isinstance(group, list)]
        if finished:
            await asyncio.to_thread(source.add_samples, finished)

    async def _finished(self, source: GroupSource, group: Group) -> Group | None:
        """The group with all members finished; None when it was dropped after too many failures."""
        while True:
            attempt = await self._maker.attempt(group)
            group = attempt.samples
            if attempt.failure is None and not attempt.aborted:
                return group
            if attempt.failure is not None and attempt.gives_up:
                await asyncio.to_thread(source.drop_samples, [group], attempt.failure)
                return None

    async def _judge(
        self, source: GroupSource, group: Group, found: Collected, count: int, *, may_fall_back: bool
    ) -> None:
        try:
            judged = await self._filter.judge(group)
        except FailedSampleError as error:
            await self._maker.set_aside(group, error)
            await asyncio.to_thread(source.drop_samples, [group], error.reason)
            return
        found.seen.append(group)
        remaining = len(found.kept) + len(self._running) + 1
        if judged.keep or (may_fall_back and judged.keep_when_insufficient and remaining <= count):
            found.kept.append(group)
            return
        await self._reject(source, group, judged, found)

    async def _reject(self, source: GroupSource, group: Group, judged: DynamicFilterOutput, found: Collected) -> None:
        reason = rejection(judged)
        found.rejected[reason] = found.rejected.get(reason, 0) + 1
        await asyncio.to_thread(source.drop_samples, [group], reason)


def _order(task: asyncio.Task[Group | None]) -> int:
    """Of groups that were finished at the same time the first one first."""
    group = None if task.cancelled() or task.exception() is not None else task.result()
    return -1 if group is None else group[0].group_index or 0
