"""Which commit a run folder goes on from: a tracker that people may edit, and a record of what it was written as."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from recovery.commit import TRACKER
from recovery.own_records import read_own_record
from storage.files import make_folder, write_atomically


class Pointer(msgspec.Struct, frozen=True):
    """`rollout/current.json`, written after each commit."""

    directory: str
    """Folder of the newest commit, relative to the run folder where it lies in it."""
    tracker: str
    """Text of the tracker when this was written."""
    version: int = 1


@dataclass(frozen=True)
class Tracker:
    """`latest_checkpointed_iteration.txt` of a folder; None for what isn't there."""

    text: str | None
    recorded: str | None
    """What the last commit wrote into it."""

    def edited_to(self, newest: int) -> str | None:
        """What somebody has written there since the last commit; None when nobody did.

        `newest` is the newest commit: a kill may have come between its record, the tracker and the pointer.
        """
        if self.text is None or self.recorded is None or self.text in (self.recorded, str(newest)):
            return None
        return self.text


def pointer_path(folder: Path) -> Path:
    return folder / "rollout" / "current.json"


def point_to(folder: Path, directory: str, rollout_id: int) -> None:
    """Let `folder` go on from the commit of `rollout_id` in `directory`."""
    make_folder(pointer_path(folder).parent)
    text = str(rollout_id)
    write_atomically(folder / TRACKER, text.encode())
    write_atomically(pointer_path(folder), msgspec.json.encode(Pointer(directory, text)))


def read_tracker(folder: Path) -> Tracker:
    """Raises `RestoreError` for a damaged pointer."""
    tracker, pointer = folder / TRACKER, pointer_path(folder)
    text = tracker.read_text(errors="replace").strip() if tracker.is_file() else None
    if not pointer.is_file():
        return Tracker(text, None)
    found = read_own_record(pointer, Pointer, next_step="Remove the file; the newest commit is chosen without it.")
    return Tracker(text, found.tracker)
