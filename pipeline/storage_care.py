"""Keeps the pool's file system usable: reclaims storage after commits and at intervals, and holds back a reserve."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from storage.disk_reserve import DiskReserve, Shortfall
from storage.reclaim import Reclaimed
from vime.errors import CoordinatorBusyError, StorageError

logger = logging.getLogger(__name__)

COLLECT_INTERVAL_S = 60.0
SHORT_INTERVAL_S = 5.0
"""Between two collections while space is short."""


class StorageCare:
    """Garbage collection and disk reserve of one queue."""

    def __init__(
        self,
        reserve: DiskReserve,
        collect: Callable[[], Reclaimed] | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`collect` reclaims storage; None where that is not wanted, or there is nothing to reclaim."""
        self._reserve, self._collect, self._clock = reserve, collect, clock
        self._collected_at = clock()
        self._error: StorageError | None = None
        self._shortfall: Shortfall | None = None

    def has_space(self) -> bool:
        """Whether the reserve is free; when it isn't, storage is reclaimed first."""
        self._shortfall = self._reserve.shortfall()
        if self._shortfall is not None and self._clock() - self._collected_at >= SHORT_INTERVAL_S:
            self.collect()
            self._shortfall = self._reserve.shortfall()
        return self._shortfall is None

    def collect_at_intervals(self) -> None:
        """Reclaim storage when that is due."""
        if self._clock() - self._collected_at >= COLLECT_INTERVAL_S:
            self.collect()

    def collect(self) -> None:
        """Reclaim storage, if that is wanted. A failure is told and stops nothing else; the next call tries again."""
        if self._collect is None:
            return
        self._collected_at = self._clock()
        try:
            reclaimed = self._collect()
        except CoordinatorBusyError:
            raise  # no failure of the collection: the queue is no longer ours
        except StorageError as error:
            if self._error is None or self._error.message != error.message:
                logger.exception("storage is not reclaimed")
            self._error = error
            return
        if self._error is not None:
            logger.info("storage is reclaimed again")
            self._error = None
        if reclaimed.packs or reclaimed.journals:
            logger.info(
                "reclaimed %d packs (%.1f MB) and %d journals",
                reclaimed.packs,
                reclaimed.bytes / 1e6,
                reclaimed.journals,
            )

    def notices(self) -> list[str]:
        """What the user should know, a sentence each."""
        found = []
        if self._shortfall is not None:
            found.append(f"Production is paused for want of space: {self._shortfall}.")
        if self._error is not None:
            found.append(f"Storage is not reclaimed, which is tried again: {self._error}")
        return found
