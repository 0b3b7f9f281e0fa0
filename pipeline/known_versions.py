"""Numbers of policy versions that a run has used: a new session begins above them all."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Protocol

import msgspec

from pipeline.evaluation.start import highest_evaluated_version
from pipeline.run_folder import RunFolder
from pipeline.session_start import Start
from storage.files import make_folder, write_atomically
from vime.errors import CorruptDataError, PublicationError, StorageError


class _Tried(msgspec.Struct, frozen=True):
    """`rollout/tried_version.json`."""

    version: int


class TriedVersions:
    """The highest number that a publication has tried, on disk before an engine can label a token with it.

    Nothing else may know of it: a response that was aborted keeps its labels, and no group was accepted or trained
    under that version yet. Thread-safe: the note of a publication that was given up may still be being written.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._turn = path, threading.Lock()

    def highest(self) -> int:
        """0 before the first. Raises `CorruptDataError`."""
        if not self._path.exists():
            return 0
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Tried).version
        except (OSError, msgspec.MsgspecError) as error:
            raise CorruptDataError(
                f"{self._path} can't be read: {error}.",
                next_step="Write the highest version of metrics.jsonl, and some more, into it.",
            ) from error

    def note(self, version: int) -> None:
        """Keep a number that is about to be tried. Raises `PublicationError`: it must not be tried then."""
        try:
            with self._turn:
                if version > self.highest():
                    make_folder(self._path.parent)
                    write_atomically(self._path, msgspec.json.encode(_Tried(version)))
        except StorageError as error:
            raise PublicationError(
                f"Version {version} is not published, for its number can't be kept: {error.message}",
                next_step=error.next_step,
            ) from error


class KnowingVersions(Protocol):
    """Processes that know of versions."""

    async def highest_version(self) -> int:
        """Of groups that wait, and of batches that were trained."""
        ...


class HavingVersions(Protocol):
    """The trainer's ranks."""

    async def highest_version_on_disk(self) -> int: ...


async def highest_known_version(
    folder: RunFolder, start: Start, queue: KnowingVersions, trainers: HavingVersions, kept_version: int | None
) -> int:
    """Above this no version of the run was ever used, whatever became of it; `kept_version` is that of kept engines."""
    return max(
        0 if start.commit is None else start.commit.weight_version,
        kept_version or 0,
        TriedVersions(folder.tried_version).highest(),
        highest_evaluated_version(folder.root),
        await queue.highest_version(),
        await trainers.highest_version_on_disk(),
    )
