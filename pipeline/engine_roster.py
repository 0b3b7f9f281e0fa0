"""Who of the engines serves the trained weights, and why the others don't."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from pipeline.engine_update import EngineUpdate, Weights, note_failures
from pipeline.weight_transports.transport import Deadline
from vime.backends.vllm_utils.client import EngineClient

logger = logging.getLogger(__name__)

MAX_FENCED = 2
"""Publications in a row that may leave out an engine before it is replaced, where engines are."""


class EngineRoster:
    """After the first publication each engine either serves or is fenced, with a reason.

    An engine that is fenced, by a publication or by `fence`, serves again only after an update in which it has
    confirmed the version that the others serve.
    """

    def __init__(
        self, engines: Sequence[EngineClient], tell_fenced: Callable[[Mapping[str, str]], None] | None = None
    ) -> None:
        """`tell_fenced` is told which engines get no requests, and why, whenever that may have changed."""
        self.engines = list(engines)
        self._tell_fenced = tell_fenced
        self._serving: set[str] = set()
        self._in_doubt: set[str] = set()
        self.fenced: dict[str, str] = {}
        """Engines that get no requests -> why."""
        self._gone: dict[str, str] = {}
        """Engines without a process that could take a version -> why."""
        self._given_up: set[str] = set()
        """Those of them that never come back."""
        self._lost: dict[str, str] = {}
        """Engines that were fenced from outside since the updates began -> why."""
        self._returned = asyncio.Event()
        self._num_fenced: dict[str, int] = {}

    @property
    def serving(self) -> list[str]:
        """Engines that get requests."""
        return sorted(self._serving)

    def serves(self, engine: EngineClient) -> bool:
        """Whether the engine gets requests."""
        return engine.address in self._serving

    @property
    def behind(self) -> list[str]:
        """Engines that get no requests, though they could take a version."""
        return sorted(set(self.fenced) - set(self._gone))

    @property
    def fenced_for_now(self) -> dict[str, str]:
        """Engines that get no requests -> why, but for those that were given up."""
        return {address: reason for address, reason in self.fenced.items() if address not in self._given_up}

    @property
    def left(self) -> list[EngineClient]:
        """Engines that were not given up."""
        return [engine for engine in self.engines if engine.address not in self._given_up]

    @property
    def all_are_replaced(self) -> bool:
        """Whether none of those that are left has a process that could take a version."""
        return all(engine.address in self._gone for engine in self.left)

    def fence(self, address: str, reason: str) -> None:
        """Count on an engine in no update until `readmit`."""
        self._gone[address] = self._lost[address] = self.fenced[address] = reason
        self._serving.discard(address)
        self._fences_changed()

    def readmit(self, address: str, now_at: str | None = None) -> None:
        """The engine at this address runs anew and can take a version, `now_at` another address where it has moved."""
        del self._gone[address]
        self._in_doubt.discard(address)
        self._num_fenced.pop(address, None)
        if now_at is not None and now_at != address:
            for engine in self.engines:
                if engine.address == address:
                    engine.move(now_at)
            for noted in (self.fenced, self._lost):
                noted[now_at] = noted.pop(address)
            self._fences_changed()
        self._returned.set()

    def give_up(self, address: str) -> None:
        """A fenced engine never comes back: from now on updates are for the others."""
        self._given_up.add(address)
        self._in_doubt.discard(address)
        self._num_fenced.pop(address, None)

    async def next_return(self) -> None:
        """Until an engine is readmitted."""
        self._returned.clear()
        await self._returned.wait()

    async def someone_is_behind(self) -> None:
        """Until an engine that gets no requests can take a version."""
        while not self.behind:
            await self.next_return()

    def begin(self, engines: Sequence[EngineClient], deadline: Deadline) -> list[EngineUpdate]:
        """An update of each of these engines; those without a process are left out from the start."""
        self._lost = dict(self._gone)
        updates = [EngineUpdate(engine, deadline, in_doubt=engine.address in self._in_doubt) for engine in engines]
        note_failures(updates, self._gone)
        return updates

    def judge(self, version: int, updates: Sequence[EngineUpdate]) -> bool:
        """Note who serves and who is fenced after these updates; whether an engine serves the version."""
        note_failures(updates, self._lost)
        new = [u for u in updates if u.weights is Weights.NEW and u.samples and u.engine.address not in self._lost]
        before, concerned = self._serving, {update.engine.address for update in updates}
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
        for address, reason in self.fenced_for_now.items():
            logger.warning(
                "engine %s gets no requests, since version %d was not confirmed: %s", address, version, reason
            )
        self._fences_changed()
        return bool(new)

    def cut_short(self, updates: Sequence[EngineUpdate]) -> bool:
        """Fence whoever may hold something else than the version that serves; whether there is such an engine."""
        changed = [update.engine.address for update in updates if update.weights is not Weights.OLD]
        self.fenced |= dict.fromkeys(changed, "its publication was cut short")
        self._serving -= set(changed)
        self._in_doubt |= set(changed)
        self._fences_changed()
        return bool(changed)

    def useless(self, updates: Sequence[EngineUpdate]) -> dict[str, str]:
        """Engines to replace -> why: those left out `MAX_FENCED` times in a row, or all of them when none serves.

        They can take no version until `readmit`. To be called once after the updates that left them out.
        """
        useless: dict[str, str] = {}
        for address in {update.engine.address for update in updates} & set(self.behind):
            self._num_fenced[address] = self._num_fenced.get(address, 0) + 1
            if self._num_fenced[address] >= MAX_FENCED or not self._serving:
                useless[address] = self.fenced[address]
        self._gone |= useless
        return useless

    def _fences_changed(self) -> None:
        if self._tell_fenced is not None:
            self._tell_fenced(self.fenced)
