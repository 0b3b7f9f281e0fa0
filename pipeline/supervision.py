"""Watches that a run gets on: says who waits for whom when it doesn't, and ends it at last."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from pipeline.activity import ProducerActivity
from pipeline.messages import QueueCounts
from pipeline.stages import StageBoard
from pipeline.stall_chain import RankActivity, RunReport, Silent, chain_words
from storage.files import append_durably
from vime.errors import EngineError, RunFailedError, StalledError, StorageError, VimeError

logger = logging.getLogger(__name__)

ASK_S = 5.0
"""How long a process may take to say what it is at."""
POLL_S = 5.0

_Answer = TypeVar("_Answer")


class Reporting(Protocol):
    """Whom the supervisor asks. What is returned isn't awaited yet."""

    def ask_coordinator(self) -> Awaitable[QueueCounts]: ...
    def ask_producers(self) -> list[Awaitable[ProducerActivity]]: ...
    def ask_ranks(self) -> list[Awaitable[RankActivity]]: ...
    def ask_engines(self) -> Mapping[str, Awaitable[None]]:
        """Address -> a check that returns when the engine answers; without those that sleep."""
        ...

    def ask_frozen_engines(self) -> Mapping[str, Awaitable[None]]:
        """The same of engines that aren't trained."""
        ...

    def fenced_engines(self) -> Mapping[str, str]:
        """Engines that get no requests -> why."""
        ...


class StallRecord(msgspec.Struct, frozen=True):
    """One line of `stalls.jsonl`."""

    time_s: float
    """Unix time."""
    quiet_s: float
    """Since when nothing has gone on."""
    words: str
    """Who waits for whom."""


@dataclass(frozen=True)
class Patience:
    """Seconds without progress: after `tell_s`, and every `tell_s` from then on, it is told; at `limit_s` it ends."""

    tell_s: float
    limit_s: float


class Supervisor:
    """One session's. Every question that it asks has a deadline, so that a process that hangs is named itself."""

    def __init__(
        self,
        board: StageBoard,
        reporting: Reporting,
        patience: Patience,
        tell: Callable[[StallRecord], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell` is told of a stall again and again; `clock` gives seconds and never goes back."""
        self._board, self._reporting, self._patience = board, reporting, patience
        self._tell, self._clock = tell, clock
        self._seen: tuple[int | None, ...] = (None, None, None)
        self._since = self._tell_at = clock()

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            StalledError: nothing went on for as long as it may.
        """
        poll_s = min(POLL_S, self._patience.tell_s / 4, self._patience.limit_s / 4)
        while True:
            await asyncio.sleep(poll_s)
            await self.look()

    async def look(self) -> None:
        """Compare with the last look; see `run`."""
        number = self._board.number
        counts, ranks = await asyncio.gather(
            self._ask(self._reporting.ask_coordinator()), self._ask_all(self._reporting.ask_ranks())
        )
        report = RunReport(self._board.stage, counts, ranks=ranks)
        now = self._clock()
        seen: tuple[int | None, ...] = (number, report.num_ended, report.num_steps)
        # Who is silent has made no progress that anybody knows of, and none when it speaks again and says the same.
        seen = tuple(old if new is None else new for old, new in zip(self._seen, seen, strict=True))
        if seen != self._seen:
            self._seen, self._since, self._tell_at = seen, now, now + self._patience.tell_s
            return
        quiet_s = now - self._since
        ends = quiet_s >= self._patience.limit_s and self._board.stage.is_bounded
        if not ends and now < self._tell_at:
            return
        words = chain_words(await self._whole(report))
        self._tell_at = now + self._patience.tell_s
        self._tell(StallRecord(time.time(), quiet_s, words))
        if ends:
            raise StalledError(
                f"Nothing has gone on for {quiet_s:.0f} s, --stall-timeout is {self._patience.limit_s:g}: {words}.",
                next_step="Look at the logs of these processes in the run folder. The same command resumes; raise "
                "--stall-timeout when it may take longer.",
            )

    async def _whole(self, report: RunReport) -> RunReport:
        """With what only a stall makes worth asking."""
        producers, silent, frozen = await asyncio.gather(
            self._ask_all(self._reporting.ask_producers()),
            self._silent(self._reporting.ask_engines()),
            self._silent(self._reporting.ask_frozen_engines()),
        )
        fenced = self._reporting.fenced_engines()
        engines = {address: Silent(f"gets no requests: {why}") for address, why in fenced.items()}
        return RunReport(report.stage, report.counts, producers, report.ranks, engines | silent, frozen)

    async def _silent(self, asked: Mapping[str, Awaitable[None]]) -> dict[str, Silent]:
        checks = await self._ask_all(list(asked.values()))
        return {address: check for address, check in zip(asked, checks, strict=True) if isinstance(check, Silent)}

    async def _ask_all(self, questions: list[Awaitable[_Answer]]) -> list[_Answer | Silent]:
        return list(await asyncio.gather(*map(self._ask, questions)))

    async def _ask(self, question: Awaitable[_Answer]) -> _Answer | Silent:
        try:
            async with asyncio.timeout(ASK_S):
                return await question
        except TimeoutError:
            return Silent(f"does not answer within {ASK_S:g} s")
        except (RunFailedError, EngineError) as error:
            return Silent(f"fails: {_first_line(error)}")


def write_stall(path: Path, record: StallRecord) -> None:
    """Keep a stall in the run folder, for whoever looks in; where it can't be written the log says so."""
    try:
        append_durably(path, msgspec.json.encode(record))
    except StorageError as error:
        logger.warning("a stall was not kept: %s", error)


def _first_line(error: VimeError) -> str:
    return error.message.splitlines()[0]
