"""Publishes weights into running engines; an engine ends on the new version, on the old one, or fenced and named."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.engine_update import EngineUpdate, Weights, note_failures
from pipeline.flush import publication_flushes
from pipeline.weight_transports.transport import Deadline, Failures, Prepared, WeightTransport, failures_of, on_each
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.updates import CompareHeld, RememberHeld
from vime.errors import PublicationError
from vime.utils.kill_points import KillPoint, reach

logger = logging.getLogger(__name__)

MAX_FAILED = 3
"""Publications in a row that may reach no engine before the run ends."""
PREPARE_SHARE = 0.7
"""Part of a publication's time that preparing may take: the rest is for the engines that stand still."""
CLEAN_UP_S = 30.0
MAX_FENCED = 2
"""Publications in a row that may leave out an engine before it is replaced, where engines are."""


class Admission(Protocol):
    """The producers' side: no new request starts while weights change, and none goes to a fenced engine."""

    async def pause_admission(self) -> None: ...
    async def resume_admission(self, policy_version: int, serving: list[str]) -> None: ...
    async def serve_only(self, serving: list[str]) -> None: ...


@dataclass(frozen=True)
class Publication:
    """What one publication did."""

    version: int
    """The version that serves now."""
    raised: bool
    """Whether it is a new one; otherwise the engines serve the old one, and the next publication tries again."""
    flushed: bool
    wire_bytes: int
    """Bytes sent or written."""
    density: float
    """Share of the weights' bytes that travelled as changed."""
    prepare_s: float
    """Seconds in which the engines sampled on."""
    pause_s: float
    """Seconds in which the engines stood still."""
    fenced: dict[str, str]
    """Engines that get no requests -> why, but for those that were given up."""
    returned: list[str] = field(default_factory=list)
    """Engines that got no requests before, and do now."""


class WeightPublisher:
    """Holds the policy version; it only goes up, and a number that was tried is never used again.

    It also knows who serves: an engine that is fenced, by a publication or by `fence`, serves again only after it has
    confirmed the version that the others serve.
    """

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
    ) -> None:
        """`compare_first`: the first version must leave the engines with exactly the weights they were started with.

        `replace` asks for a new process for the engine at an address, with the reason. Whoever follows it calls `fence`
        at once and `readmit` later. `tell_fenced` is told which engines get no requests, and why, whenever that may
        have changed. In `lend_to_engines` there is room for an engine's process to start.
        """
        self._engines, self._transport, self._admission = list(engines), transport, admission
        self._start_version, self._flush_interval, self._timeout_s = start_version, flush_interval, timeout_s
        self._compare_first, self._replace, self._tell_fenced = compare_first, replace, tell_fenced
        self._lend_to_engines = lend_to_engines
        self.version = start_version
        self._tried = start_version
        self._serving: set[str] = set()
        self._in_doubt: set[str] = set()
        self.fenced: dict[str, str] = {}
        """Engines that get no requests -> why."""
        self._gone: dict[str, str] = {}
        """Engines without a process that could take a version -> why."""
        self._given_up: set[str] = set()
        """Those of them that never come back."""
        self._lost: dict[str, str] = {}
        """Engines that were fenced from outside since the publication began -> why."""
        self._returned = asyncio.Event()
        self._num_fenced: dict[str, int] = {}
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
    def serving(self) -> list[str]:
        """Engines that get requests."""
        return sorted(self._serving)

    @property
    def behind(self) -> list[str]:
        """Engines that get no requests, though they could take a version."""
        return sorted(set(self.fenced) - set(self._gone))

    async def fence(self, address: str, reason: str) -> None:
        """Send no more requests to an engine, and count on it in no publication until `readmit`."""
        self._gone[address] = self._lost[address] = self.fenced[address] = reason
        self._serving.discard(address)
        self._fences_changed()
        await self._admission.serve_only(sorted(self._serving))

    async def readmit(self, address: str, now_at: str | None = None) -> None:
        """The engine at this address runs anew and can take a version, `now_at` another address where it has moved."""
        del self._gone[address]
        self._in_doubt.discard(address)
        self._num_fenced.pop(address, None)
        if now_at is not None and now_at != address:
            for engine in self._engines:
                if engine.address == address:
                    engine.move(now_at)
            for noted in (self.fenced, self._lost):
                noted[now_at] = noted.pop(address)
            self._fences_changed()
        self._returned.set()

    async def give_up(self, address: str) -> None:
        """A fenced engine never comes back: from now on publications are for the others."""
        self._given_up.add(address)
        self._in_doubt.discard(address)
        self._num_fenced.pop(address, None)

    async def someone_is_behind(self) -> None:
        """Until an engine that gets no requests can take a version."""
        while not self.behind:
            await self._next_return()

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
        engines = [engine for engine in self._engines if engine.address in behind]
        publication = await self._attempt(self.version, engines, Deadline(self._timeout_s), flush=True)
        self._num_failed = 0 if self._serving else self._num_failed + 1
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
        if not self._engines:
            return await self._count()
        deadline = await self._someone_is_there()
        while True:
            self._tried += 1
            flush = publication_flushes(self._tried, self._start_version, self._flush_interval)
            publication = await self._attempt(self._tried, self._left, deadline, flush=flush)
            if publication.raised:
                self._num_failed = 0
                return publication
            self._num_failed += 1
            if self._serving and self._num_failed < MAX_FAILED:
                return publication
            if self._num_failed >= MAX_FAILED or not (deadline.left_s() or self._replace):
                raise self._failed(publication)
            if self._replace:
                deadline = await self._someone_is_there()

    @property
    def _left(self) -> list[EngineClient]:
        """Engines that were not given up."""
        return [engine for engine in self._engines if engine.address not in self._given_up]

    @property
    def _all_are_replaced(self) -> bool:
        return all(engine.address in self._gone for engine in self._left)

    def _fences_changed(self) -> None:
        if self._tell_fenced is not None:
            self._tell_fenced(self.fenced)

    def _failed(self, publication: Publication) -> PublicationError:
        reasons = "; ".join(f"{address}: {reason}" for address, reason in publication.fenced.items())
        return PublicationError(
            f"Version {self._tried} of the weights could not be published, {self._num_failed} attempts in a row have "
            f"failed; version {self.version} is served by {', '.join(sorted(self._serving)) or 'no engine'}. "
            f"{reasons or self._why}",
            next_step="Look at the logs of these engines, then resume the run.",
            engines=publication.fenced,
        )

    async def _someone_is_there(self) -> Deadline:
        """Wait for an engine to return when all are being replaced; the deadline of what follows."""
        if self._all_are_replaced:
            async with self._lend_to_engines():
                waiting = Deadline(self._timeout_s)
                while self._all_are_replaced and waiting.left_s():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._next_return(), waiting.left_s())
        return Deadline(self._timeout_s)

    async def _next_return(self) -> None:
        self._returned.clear()
        await self._returned.wait()

    async def _count(self) -> Publication:
        self.version = self._tried = self._tried + 1
        await self._admission.resume_admission(self.version, [])
        return Publication(self.version, True, False, wire_bytes=0, density=0.0, prepare_s=0.0, pause_s=0.0, fenced={})

    async def _attempt(
        self, version: int, engines: Sequence[EngineClient], deadline: Deadline, *, flush: bool
    ) -> Publication:
        """Bring a version to these engines; the others, if any, go on serving it meanwhile."""
        started = time.monotonic()
        self._why, self._lost, self._is_publishing = "", dict(self._gone), True
        self._num_attempts += 1
        updates = [EngineUpdate(e, deadline, in_doubt=e.address in self._in_doubt) for e in engines]
        prepared, pause_s, were_fenced = Prepared(), 0.0, set(self.fenced)
        try:
            prepared = await self._prepare(version, updates, deadline)
            prepare_s = time.monotonic() - started
            if any(update.goes_on for update in updates):
                pause_s = await self._change(version, updates, deadline, flush=flush)
            raised = self._judge(version, updates)
            self._fences_changed()
        except BaseException:
            await self._cut_short(updates)
            raise
        finally:
            self._is_publishing = False
        if self._serving:
            await self._admission.resume_admission(self.version, sorted(self._serving))
        await self._clean_up(version, published=version == self.version)
        self._replace_useless(updates)
        return Publication(
            self.version,
            raised,
            flush,
            prepared.wire_bytes,
            prepared.density,
            prepare_s,
            pause_s,
            {address: reason for address, reason in self.fenced.items() if address not in self._given_up},
            sorted(were_fenced & self._serving),
        )

    async def _cut_short(self, updates: Sequence[EngineUpdate]) -> None:
        """Whoever may hold something else than the version that serves gets no requests before the next one."""
        changed = [update.engine.address for update in updates if update.weights is not Weights.OLD]
        self.fenced |= dict.fromkeys(changed, "its publication was cut short")
        self._serving -= set(changed)
        self._in_doubt |= set(changed)
        self._fences_changed()
        if self._serving:
            await self._admission.resume_admission(self.version, sorted(self._serving))
        elif changed:
            await self._admission.serve_only([])

    async def _prepare(self, version: int, updates: list[EngineUpdate], deadline: Deadline) -> Prepared:
        """Ask who is there, and bring the version to all who are."""
        note_failures(updates, self._gone)
        asked = [update.engine for update in updates if update.goes_on]
        note_failures(updates, await on_each(asked, "asking", [e.weight_version() for e in asked], deadline))
        for update in updates:
            update.samples = update.goes_on
        present = [update.engine for update in updates if update.goes_on]
        if not present:
            return Prepared()
        someone_missed_one = bool(self.fenced.keys() - self._given_up) or len(present) < len(self._left)
        full = self._sender_is_new or self._num_failed > 0 or someone_missed_one
        try:
            preparing = self._transport.prepare(version, present, full=full, deadline=deadline)
            prepared = await deadline.bound("preparing", preparing, at_most_s=deadline.left_s(PREPARE_SHARE))
        except PublicationError as error:
            self._why = error.message
            prepared = Prepared(failures_of(error, present))
        note_failures(updates, prepared.failures)
        await self._look_for(updates, deadline)
        return prepared

    async def _look_for(self, updates: list[EngineUpdate], deadline: Deadline) -> None:
        """Of the engines that a preparation has lost, which are still there and sample."""
        lost = [update for update in updates if update.samples and not update.goes_on]
        asked = [update.engine.weight_version() for update in lost]
        gone = await on_each([update.engine for update in lost], "asking", asked, deadline)
        for update in lost:
            update.samples = update.engine.address not in gone

    async def _change(self, version: int, updates: list[EngineUpdate], deadline: Deadline, *, flush: bool) -> float:
        """Stop, load, raise the version, and let go on; how long the engines stood still."""
        going = [update for update in updates if update.goes_on]
        if len(updates) >= len(self._left):
            await self._admission.pause_admission()
        stopped_at = time.monotonic()
        try:
            await asyncio.gather(*(update.stop(flush=flush) for update in going))
            if self._compare_first:
                await self._hold(going, deadline, RememberHeld())
            await asyncio.gather(*(update.open() for update in going if update.goes_on))
            loading = [update for update in going if update.goes_on]
            for update in loading:
                update.weights = Weights.UNKNOWN
            note_failures(loading, await self._load(version, [update.engine for update in loading], deadline))
            reach(KillPoint.DURING_WEIGHTS)
            await asyncio.gather(*(update.close(version) for update in loading))
            if self._compare_first:
                await self._hold(loading, deadline, CompareHeld())
                self._compare_first = False
        finally:
            await asyncio.gather(*(update.settle() for update in going))
        return time.monotonic() - stopped_at

    async def _load(self, version: int, engines: Sequence[EngineClient], deadline: Deadline) -> Failures:
        try:
            return await deadline.bound("loading", self._transport.load(version, engines, deadline))
        except PublicationError as error:
            return failures_of(error, engines)

    async def _clean_up(self, version: int, *, published: bool) -> None:
        """What can't be cleaned up is told, and stays."""
        try:
            work = self._transport.finished(version, published=published)
            await Deadline(CLEAN_UP_S).bound("cleaning up", work)
        except PublicationError as error:
            logger.warning("after version %d: %s", version, error)

    async def _hold(self, updates: list[EngineUpdate], deadline: Deadline, request: RememberHeld | CompareHeld) -> None:
        """Raises `PublicationError` when an engine can't note its weights, or holds others than it noted."""
        engines = [update.engine for update in updates if update.goes_on]

        async def ask(engine: EngineClient) -> None:
            await engine.start_weight_update()
            await engine.update_weights(request)

        failures = await on_each(engines, "comparing the weights of", [ask(engine) for engine in engines], deadline)
        if failures:
            raise PublicationError(
                f"--check-weight-update-equal: {'; '.join(failures.values())}",
                next_step="Check that --hf-checkpoint is what the trainer was started from, in the engine's dtype.",
                engines=failures,
            )

    def _judge(self, version: int, updates: list[EngineUpdate]) -> bool:
        """Note who serves and who is fenced; whether the version is published."""
        note_failures(updates, self._lost)
        new = [u for u in updates if u.weights is Weights.NEW and u.samples and u.engine.address not in self._lost]
        before, concerned = self._serving, {update.engine.address for update in updates}
        if new:
            self.version = version
            self._sender_is_new = False
        self._serving = before - concerned
        self.fenced = {address: reason for address, reason in self.fenced.items() if address not in concerned}
        self._in_doubt -= concerned
        self._in_doubt |= {update.engine.address for update in updates if update.weights is Weights.UNKNOWN}
        for update in updates:
            address = update.engine.address
            is_current = update in new if new else update.weights is Weights.OLD and address in before
            if is_current and update.samples and address not in self._lost:
                self._serving.add(address)
                self._num_fenced.pop(address, None)
            else:
                self.fenced[address] = update.problem or f"holds {update.weights.value}"
        for address, reason in self.fenced.items():
            if address in self._given_up:
                continue
            logger.warning(
                "engine %s gets no requests, since version %d was not confirmed: %s", address, version, reason
            )
        return bool(new)

    def _replace_useless(self, updates: list[EngineUpdate]) -> None:
        """Ask for new engines in place of those that were left out too often, or of all when none serves."""
        if self._replace is None:
            return
        for address in {update.engine.address for update in updates} & set(self.behind):
            self._num_fenced[address] = self._num_fenced.get(address, 0) + 1
            if self._num_fenced[address] >= MAX_FENCED or not self._serving:
                self._gone[address] = self.fenced[address]
                self._replace(address, self.fenced[address])
