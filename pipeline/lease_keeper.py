"""Heartbeats on a thread, for code that holds leases without an event loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

BATCH = 128
"""Most leases in one heartbeat."""


class LeaseKeeper:
    """Extends the leases that it is given until they are ended, or turn out to be somebody else's.

    Close it: its thread ends then.
    """

    def __init__(self, heartbeat: Callable[[list[bytes]], list[bool]], lease_seconds: float) -> None:
        self._heartbeat = heartbeat
        self._interval_s = max(0.1, lease_seconds / 3)
        self._lock = threading.Lock()
        self._held: dict[bytes, int] = {}
        self._failure: Exception | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)
        self._thread.start()

    def add(self, lease: bytes, group_index: int) -> None:
        """Keep a lease from now on."""
        with self._lock:
            self._held[lease] = group_index

    def end(self, leases: Iterable[bytes]) -> None:
        """Keep these no longer."""
        with self._lock:
            for lease in leases:
                self._held.pop(lease, None)

    def held(self) -> dict[bytes, int]:
        """Lease -> group index, of all that are kept."""
        with self._lock:
            return dict(self._held)

    def check(self) -> None:
        """Raise what the heartbeats failed with, if they did."""
        if self._failure is not None:
            raise self._failure

    def beat(self) -> None:
        """Extend all leases once; those that are no longer ours are let go of."""
        leases = list(self.held())
        for start in range(0, len(leases), BATCH):
            part = leases[start : start + BATCH]
            lost = [lease for alive, lease in zip(self._heartbeat(part), part, strict=True) if not alive]
            if lost:
                logger.warning("%d groups belong to another attempt now", len(lost))
            self.end(lost)

    def close(self) -> None:
        """Stop; leases that are still held expire."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            try:
                self.beat()
            except Exception as error:  # the thread's boundary: whoever uses the leases is told
                self._failure = error
                return
