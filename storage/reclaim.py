"""Deletes packs that nothing needs and the journals of segments that have ended for good.

straw's own garbage collection is not used: its catalog gets 2 KiB for each group, never shrinks, is read by every
process that opens the pool, and binds the pool to its path. The queue knows what it needs. A pack goes when no
reference of the queue or of an owner leads into it, its writer has gone on to another pack or has ended, it has not
grown since (times of files follow clocks, which may be set back), and every lease has ended under which something in it
could still become a result.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from storage.ended_writers import ended_writers, forget_writer, has_ended, mark_writer_ended
from storage.files import write_atomically
from storage.os_errors import os_error
from storage.segment_list import SegmentList
from vime.errors import CorruptDataError


class Reclaimed(msgspec.Struct, frozen=True):
    """What one collection deleted."""

    packs: int = 0
    bytes: int = 0
    journals: int = 0


class Reclaimer:
    """Deletes files of one pool; belongs to the holder of the coordinator lock."""

    def __init__(self, root: Path, control_dir: Path) -> None:
        self._root = root
        self._session = control_dir / "session.json"
        self._control_dir = control_dir
        self._idle_since: dict[Path, tuple[int, int]] = {}
        """Pack -> its bytes, and the newest lease when it was first seen with these, finished and not needed."""

    def begin_session(self, name: str) -> bool:
        """All writers of earlier sessions have ended, for no two sessions of a run overlap.

        The same name again, from a coordinator that was restarted, changes nothing: the producers go on. Whether it is
        the same.
        """
        try:
            if self._session.exists() and json.loads(self._session.read_bytes()) == {"name": name}:
                return True
        except ValueError as error:
            raise CorruptDataError(f"{self._session} can't be read: {error}.", next_step="Delete it.") from error
        for folder in [*self._root.glob("raw/*/*"), *self._root.glob("control/writers/*/*")]:
            mark_writer_ended(self._control_dir, folder.name)
        write_atomically(self._session, json.dumps({"name": name}).encode())
        return False

    def collect(self, segments: SegmentList, needed: set[str]) -> Reclaimed:
        """Delete what isn't needed; `needed` are packs relative to the pool's root. Raises `StorageError`."""
        oldest_lease = segments.oldest_serial()
        newest_lease = segments.newest_serial()
        packs, num_bytes = 0, 0
        try:
            finished = set(self._finished_packs())
            self._idle_since = {path: since for path, since in self._idle_since.items() if path in finished}
            for path in finished:
                if str(path.relative_to(self._root)) in needed:
                    self._idle_since.pop(path, None)
                    continue
                size = path.stat().st_size
                if self._idle_since.get(path, (-1, 0))[0] != size:
                    self._idle_since[path] = size, newest_lease
                if oldest_lease > self._idle_since[path][1]:
                    num_bytes += size
                    packs += 1
                    path.unlink()
                    del self._idle_since[path]
            self._remove_ended_writers()
            journals = self._remove_journals({entry.queue_id for entry in segments.entries if not entry.is_reclaimed})
        except OSError as error:
            raise os_error(error, self._root, 0) from error
        return Reclaimed(packs, num_bytes, journals)

    def _finished_packs(self) -> Iterator[Path]:
        """Packs that nobody appends to: all but the newest of each writer that may be alive."""
        for folder in self._root.glob("raw/*/*"):
            packs = sorted(folder.glob("*.pack"), key=lambda path: path.stat().st_mtime_ns)
            yield from packs if has_ended(self._control_dir, folder.name) else packs[:-1]

    def _remove_ended_writers(self) -> None:
        """straw's notes on writers that have ended and have no pack left."""
        for writer_id in ended_writers(self._control_dir):
            folder = self._root / "raw" / writer_id[:2] / writer_id
            if folder.exists() and any(folder.glob("*.pack")):
                continue
            notes = self._root / "control" / "writers" / writer_id[:2] / writer_id
            for leftover in (folder, notes):
                if leftover.exists():
                    shutil.rmtree(leftover)
            forget_writer(self._control_dir, writer_id)

    def _remove_journals(self, kept: set[str]) -> int:
        """Delete straw queues of groups that the list of segments doesn't name, or calls reclaimed."""
        removed = 0
        for folder in (self._root / "queues").glob("*"):
            description = folder / "run.json"
            queue_id = json.loads(description.read_bytes())["queue_id"] if description.exists() else ""
            if queue_id.startswith("groups-") and queue_id not in kept:
                shutil.rmtree(folder)
                removed += 1
        return removed
