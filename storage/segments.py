"""`vime/queue.json`: the segments that a pool's queue consists of, each a straw queue of its own."""

from __future__ import annotations

from pathlib import Path

import msgspec

from storage.files import write_atomically
from storage.os_errors import os_error
from vime.data.cursor import PromptCursor
from vime.errors import CorruptDataError, SchemaVersionError

SCHEMA_VERSION = 4


class SegmentSummary(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a closed segment holds. All its groups are accepted or dropped, so it never changes."""

    num_accepted: int
    """Its positions are those of `storage.positions`, from 0 up to this number."""
    dropped: dict[str, int]
    """Reason -> groups."""
    reclaimed: bool = False
    """Whether it ended for good: its journal and its payloads may be gone."""

    @property
    def num_groups(self) -> int:
        return self.num_accepted + sum(self.dropped.values())


class SegmentEntry(msgspec.Struct, frozen=True):
    """One segment in the list."""

    index: int
    queue_id: str
    cursor: PromptCursor
    """Where the prompts stood when it was opened: its groups are numbered from `cursor.next_group_index` on."""
    summary: SegmentSummary | None = None
    """None while it is open. The last segment, which takes new prompts, always is."""

    @property
    def is_reclaimed(self) -> bool:
        return self.summary is not None and self.summary.reclaimed


class _QueueFile(msgspec.Struct, frozen=True):
    schema_version: int
    segments: list[SegmentEntry]


class _Versioned(msgspec.Struct, frozen=True):
    schema_version: int


def queue_file(control_dir: Path) -> Path:
    """The file that names the segments; a pool without it has no queue."""
    return control_dir / "queue.json"


def read_segments(path: Path) -> list[SegmentEntry]:
    """The segments, oldest first.

    Raises `CorruptDataError` or `SchemaVersionError`.
    """
    try:
        content = path.read_bytes()
        refuse_other_schema(path, msgspec.json.decode(content, type=_Versioned).schema_version)
        entries = msgspec.json.decode(content, type=_QueueFile).segments
    except (OSError, msgspec.MsgspecError) as error:
        raise CorruptDataError(f"{path} can't be read: {error}.", next_step="Restore it from a copy.") from error
    if not entries or entries[-1].summary is not None or [e.index for e in entries] != list(range(len(entries))):
        raise CorruptDataError(
            f"{path}: segments must be numbered from 0 and the last one open, found "
            f"{[(entry.index, 'open' if entry.summary is None else 'closed') for entry in entries[-3:]]} at its end.",
            next_step="Restore it from a copy.",
        )
    return entries


def refuse_other_schema(path: Path, version: int) -> None:
    """Raise `SchemaVersionError` for a queue that another layout wrote."""
    if version > SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{path} has schema version {version}, this code reads {SCHEMA_VERSION}.",
            next_step="Update vime to the version that wrote the pool.",
        )
    if version < SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{path} has schema version {version}, this code reads {SCHEMA_VERSION}: groups and references are "
            "stored in another form since then.",
            next_step="Finish the run with the vime that began it, or begin a new one.",
        )


def write_segments(path: Path, entries: list[SegmentEntry]) -> None:
    """Replace the list; after a crash the file holds the old list or the new one."""
    try:
        write_atomically(path, msgspec.json.encode(_QueueFile(SCHEMA_VERSION, entries)))
    except OSError as error:
        raise os_error(error, path, 0) from error
