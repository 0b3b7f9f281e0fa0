"""Publishes weights into running engines; an engine ends on the new version, on the old one, or fenced and named."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Protocol

from pipeline.engine_roster import EngineRoster
from pipeline.engine_update import EngineUpdate, note_failures
from pipeline.flush import publication_flushes
from pipeline.publication import Publication
from pipeline.weight_change import WeightChange, pause_s
from pipeline.weight_transports.transport import Deadline, Prepared, WeightTransport, failures_of, on_each
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import PublicationError

logger = logging.getLogger(__name__)

MAX_FAILED = 3
"""Publications in a row that may reach no engine before the run ends."""
PREPARE_SHARE = 0.7
"""Part of a publication's time that preparing may take: the rest is for the engines that stand still."""
CLEAN_UP_S = 30.0


class Admission(Protocol):
    """The producers' side: no new request starts while weights change, and none goes to a fenced engine."""

    async def pause_admission(self) -> None: ...
    async def resume_admission(self, policy_version: int, serving: list[str]) -> None: ...
    async def serve_only(self, serving: list[str]) -> None: ...


class WeightPublisher:
    """Holds the policy version; it only goes up, and a number that was tried is never used again."""

    def __init__(
        self,
        engines: Sequence[EngineClient],
        transport: WeightTransport,
        admission: Admission,
        *,
        start_version: int,
        flush_interval: int,
        timeout_s: float,
        compare_first: bool = False,
        replace: Callable[[str, str], None] | None = None,
        tell_fenced: Callable[[Mapping[str, str]], None] | None = None,
        lend_to_engines: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        note_tried: Callable[[int], None] | None = None,
    ) -> None:
        """`compare_first`: the first version must leave the engines with exactly the weights they were started with.

        `replace` asks for a new process for the engine at an address, with the reason. Whoever follows it calls `fence`
        at once and `readmit` later. `tell_fenced` is told which engines get no requests, and why, whenever that may
        have changed. In `lend_to_engines` there is room for an engine's process to start. `note_tried` keeps a number
        before any engine hears of it; what it raises, a `PublicationError`, keeps it from them.
        """
        self._roster = EngineRoster(engines, tell_fenced)
        self._changing = WeightChange(transport, compare_first=compare_first)
        self._transport, self._admission = transport, admission
        self._start_version, self._flush_interval, self._timeout_s = start_version, flush_interval, timeout_s
        self._replace, self._lend_to_engines, self._note_tried = replace, lend_to_engines, note_tried
        self.version = start_version
        self._tried = start_version
        self._num_failed = self._num_attempts = 0
        self._why = ""
        self._is_publishing = self._sender_is_new = False

    @property
    def moment(self) -> int | None:
        """Tells moments between publications apart; None while one is under way and engines may stand still."""
        return None if self._is_publishing else self._num_attempts

    def sender_is_new(self) -> None:
        """The trainer's processes are others than before: the next version builds on nothing that engines hold."""
        self._sender_is_new = True

    @property
    def next_version(self) -> int:
        """The number that the next publication tries."""
        return self._tried + 1

    @property
    def serving(self) -> list[str]:
        """Engines that get requests."""
        return self._roster.serving

    @property
    def fenced(self) -> Mapping[str, str]:
        """Engines that get no requests -> why."""
        return self._roster.fenced

    @property
    def behind(self) -> list[str]:
        """Engines that get no requests, though they could take a version."""
        return self._roster.behind

    async def fence(self, address: str, reason: str) -> None:
        """Send no more requests to an engine, and count on it in no publication until `readmit`."""
        self._roster.fence(address, reason)
        await self._admission.serve_only(self.serving)

    async def readmit(self, address: str, now_at: str | None = None) -> None:
        """The engine at this address runs anew and can take a version, `now_at` another address where it has moved."""
        self._roster.readmit(address, now_at)

    async def give_up(self, address: str) -> None:
        """A fenced engine never comes back: from now on publications are for the others."""
        self._roster.give_up(address)

    async def someone_is_behind(self) -> None:
        """Until an engine that gets no requests can take a version."""
        await self._roster.someone_is_behind()

    def repeats(self) -> bool:
        """Whether `catch_up` can bring the version that serves to further engines."""
        return self._transport.repeats(self.version)

    async def catch_up(self) -> Publication:
        """Bring the version that serves to engines that are `behind`, while the others go on.

        The trainer must still hold the weights of that version, or the transport must be able to repeat it. An engine
        that fails stays fenced.

        Raises:
            PublicationError: no engine serves, after `MAX_FAILED` attempts in a row.
        """
        behind = set(self.behind)
        engines = [engine for engine in self._roster.engines if engine.address in behind]
        publication = await self._attempt(self.version, engines, Deadline(self._timeout_s), flush=True)
        self._num_failed = 0 if self.serving else self._num_failed + 1
        if self._num_failed >= MAX_FAILED:
            raise self._failed(publication)
        return publication

    async def publish(self) -> Publication:
        """Publish the trainer's weights as the next version; without engines it is only counted.

        When it returns every engine serves `version`, or is fenced and named. Takes at most `timeout_s` and a few
        calls to bring engines back to work.

        Raises:
            PublicationError: no engine serves, or nothing could be published for `MAX_FAILED` times in a row.
        """
        if not self._roster.engines:
            return await self._count()
        deadline = await self._someone_is_there()
        while True:
            self._tried += 1
            flush = publication_flushes(self._tried, self._start_version, self._flush_interval)
            publication = await self._attempt(self._tried, self._roster.left, deadline, flush=flush)
            if publication.raised:
                self._num_failed = 0
                return publication
            self._num_failed += 1
            if self.serving and self._num_failed < MAX_FAILED:
                return publication
            if self._num_failed >= MAX_FAILED or not (deadline.left_s() or self._replace):
                raise self._failed(publication)
            if self._replace:
                deadline = await self._someone_is_there()

    def _failed(self, publication: Publication) -> PublicationError:
        reasons = "; ".join(f"{address}: {reason}" for address, reason in publication.fenced.items())
        return PublicationError(
            f"Version {self._tried} of the weights could not be published, {self._num_failed} attempts in a row have "
            f"failed; version {self.version} is served by {', '.join(self.serving) or 'no engine'}. "
            f"{reasons or self._why}",
            next_step="Look at the logs of these engines, then resume the run.",
            engines=publication.fenced,
        )

    async def _someone_is_there(self) -> Deadline:
        """Wait for an engine to return when all are being replaced; the deadline of what follows."""
        if self._roster.all_are_replaced:
            async with self._lend_to_engines():
                waiting = Deadline(self._timeout_s)
                while self._roster.all_are_replaced and waiting.left_s():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._roster.next_return(), waiting.left_s())
        return Deadline(self._timeout_s)

    async def _count(self) -> Publication:
        self.version = self._tried = self._tried + 1
        await self._admission.resume_admission(self.version, [])
        return Publication(self.version, True, False, wire_bytes=0, density=0.0, prepare_s=0.0, pause_s=0.0, fenced={})

    async def _attempt(
        self, version: int, engines: Sequence[EngineClient], deadline: Deadline, *, flush: bool
    ) -> Publication:
        """Bring a version to these engines; the others, if any, go on serving it meanwhile."""
        started = time.monotonic()
        self._why, self._is_publishing = "", True
        self._num_attempts += 1
        updates = self._roster.begin(engines, deadline)
        change_s, were_fenced = 0.0, set(self.fenced)
        try:
            prepared = await self._prepare(version, updates, deadline)
            prepare_s = time.monotonic() - started
            if any(update.goes_on for update in updates):
                change_s = await self._change(version, updates, deadline, flush=flush)
            raised = self._roster.judge(version, updates)
            if raised:
                self.version, self._sender_is_new = version, False
        except BaseException:
            await self._cut_short(updates)
            raise
        finally:
            self._is_publishing = False
        if self.serving:
            await self._admission.resume_admission(self.version, self.serving)
        stood_still_s = await pause_s(updates, change_s, deadline)
        await self._clean_up(version, published=version == self.version)
        self._replace_useless(updates)
        return Publication(
            self.version,
            raised,
            flush,
            prepared.wire_bytes,
            prepared.density,
            prepare_s,
            stood_still_s,
            fenced=self._roster.fenced_for_now,
            returned=sorted(were_fenced & set(self.serving)),
            change_s=change_s,
        )

    async def _cut_short(self, updates: Sequence[EngineUpdate]) -> None:
        """Whoever may hold something else than the version that serves gets no requests before the next one."""
        someone_was_changed = self._roster.cut_short(updates)
        if self.serving:
            await self._admission.resume_admission(self.version, self.serving)
        elif someone_was_changed:
            await self._admission.serve_only([])

    async def _prepare(self, version: int, updates: Sequence[EngineUpdate], deadline: Deadline) -> Prepared:
        """Ask who is there, and bring the version to all who are."""
        asked = [update.engine for update in updates if update.goes_on]
        note_failures(updates, await on_each(asked, "asking", [e.weight_version() for e in asked], deadline))
        for update in updates:
            update.samples = update.goes_on
        present = [update.engine for update in updates if update.goes_on]
        if not present:
            return Prepared()
        someone_missed_one = bool(self._roster.fenced_for_now) or len(present) < len(self._roster.left)
        full = self._sender_is_new or self._num_failed > 0 or someone_missed_one
        try:
            if self._note_tried is not None:
                await asyncio.to_thread(self._note_tried, version)
            preparing = self._transport.prepare(version, present, full=full, deadline=deadline)
            prepared = await deadline.bound("preparing", preparing, at_most_s=deadline.left_s(PREPARE_SHARE))
        except PublicationError as error:
            self._why = error.message
            prepared = Prepared(failures_of(error, present))
        note_failures(updates, prepared.failures)
        await _look_for_lost(updates, deadline)
        return prepared

    async def _change(self, version: int, updates: Sequence[EngineUpdate], deadline: Deadline, *, flush: bool) -> float:
        """Bring the version into the models; how long that took."""
        going = [update for update in updates if update.goes_on]
        serving = [update for update in going if self._roster.serves(update.engine)]
        swapping = await self._changing.who_swaps(serving, flush=flush)
        halting = [update for update in going if update not in swapping and update.goes_on]
        if len(updates) >= len(self._roster.left):
            await self._admission.pause_admission()
        began = time.monotonic()
        await self._changing.apply(version, swapping, halting, deadline, flush=flush)
        return time.monotonic() - began

    async def _clean_up(self, version: int, *, published: bool) -> None:
        """What can't be cleaned up is told, and stays."""
        try:
            work = self._transport.finished(version, published=published)
            await Deadline(CLEAN_UP_S).bound("cleaning up", work)
        except PublicationError as error:
            logger.warning("after version %d: %s", version, error)

    def _replace_useless(self, updates: Sequence[EngineUpdate]) -> None:
        if self._replace is not None:
            for address, reason in self._roster.useless(updates).items():
                self._replace(address, reason)


async def _look_for_lost(updates: Sequence[EngineUpdate], deadline: Deadline) -> None:
    """Of the engines that a preparation has lost, which are still there and sample."""
    lost = [update for update in updates if update.samples and not update.goes_on]
    asked = [update.engine.weight_version() for update in lost]
    gone = await on_each([update.engine for update in lost], "asking", asked, deadline)
    for update in lost:
        update.samples = update.engine.address not in gone
