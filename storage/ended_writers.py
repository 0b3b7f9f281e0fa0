"""Which of straw's writers have ended: an empty file each, so that their last packs can be reclaimed too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from storage.files import make_folder
from storage.os_errors import os_error


def mark_writer_ended(control_dir: Path, writer_id: str) -> None:
    """Note that a writer appends no more; to be called when its store is closed. Raises `StorageError`."""
    folder = control_dir / "ended_writers"
    make_folder(folder)
    try:
        (folder / writer_id).touch()
    except OSError as error:
        raise os_error(error, folder, 0) from error


def has_ended(control_dir: Path, writer_id: str) -> bool:
    return (control_dir / "ended_writers" / writer_id).exists()


def ended_writers(control_dir: Path) -> Iterator[str]:
    """Ids of the writers that have ended and have something left to delete."""
    yield from [path.name for path in (control_dir / "ended_writers").glob("*")]


def forget_writer(control_dir: Path, writer_id: str) -> None:
    """Nothing is left of a writer that has ended."""
    (control_dir / "ended_writers" / writer_id).unlink(missing_ok=True)
