"""When leases began and were last extended, for people who look in: straw's journal has no clock.

A small file beside the queue, replaced at most once a second and never synced. It is a help to the eye: nothing is
decided by it, and an entry counts only while the journal says that its lease holds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from storage.refs import lease_from_bytes

logger = logging.getLogger(__name__)

WRITE_INTERVAL_S = 1.0


class LeaseTimes(msgspec.Struct, frozen=True):
    """Unix seconds."""

    leased_at: float
    extended_at: float
    """Of the last heartbeat; as `leased_at` before the first."""


class LeaseBoard:
    """Keeps the file of one coordinator; without a folder it keeps nothing on the disk."""

    def __init__(self, control_dir: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = None if control_dir is None else _board_path(control_dir), clock
        self._times: dict[str, LeaseTimes] = {}
        self._changed = False
        self._written_at = 0.0

    def leased(self, leases: Iterable[bytes]) -> None:
        """These leases begin."""
        now = self._clock()
        for lease in leases:
            self._times[lease_from_bytes(lease).attempt_id] = LeaseTimes(now, now)
            self._changed = True

    def extended(self, leases: Iterable[bytes]) -> None:
        """A heartbeat came for these leases."""
        now = self._clock()
        for lease in leases:
            attempt_id = lease_from_bytes(lease).attempt_id
            if attempt_id in self._times:
                self._times[attempt_id] = LeaseTimes(self._times[attempt_id].leased_at, now)
                self._changed = True

    def ended(self, lease: bytes) -> None:
        """A lease is over."""
        self._changed |= self._times.pop(lease_from_bytes(lease).attempt_id, None) is not None

    def write_if_due(self) -> None:
        """Replace the file when something has changed and the last time was long enough ago."""
        if self._path is None or not self._changed or self._clock() - self._written_at < WRITE_INTERVAL_S:
            return
        self._changed, self._written_at = False, self._clock()
        temporary = self._path.with_suffix(".new")
        try:
            temporary.write_bytes(msgspec.json.encode(self._times))
            temporary.replace(self._path)
        except OSError as error:
            logger.warning("%s can't be written, so the ages of leases are not shown: %s", self._path, error)


def read_lease_times(control_dir: Path) -> dict[str, LeaseTimes]:
    """Attempt id -> times, of the leases that the newest coordinator has noted; empty when there is no such file."""
    try:
        return msgspec.json.decode(_board_path(control_dir).read_bytes(), type=dict[str, LeaseTimes])
    except (OSError, msgspec.MsgspecError):
        return {}  # another replaces it just now, or its coordinator was killed while it wrote


def _board_path(control_dir: Path) -> Path:
    return control_dir / "lease_times.json"
