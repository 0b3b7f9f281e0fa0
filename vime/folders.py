"""Where a folder is, or could be made."""

from __future__ import annotations

from pathlib import Path


def existing_parent(folder: Path) -> Path:
    """`folder` itself, or its nearest ancestor that exists: where it would be made. Raises `OSError`."""
    absolute = folder.absolute()
    return next(path for path in (absolute, *absolute.parents) if path.exists())


def file_in_the_way(folder: Path) -> Path | None:
    """The file at `folder` or above it that keeps it from being a folder; None when nothing does. Raises `OSError`."""
    place = existing_parent(folder)
    return None if place.is_dir() else place
