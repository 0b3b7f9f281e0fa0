"""Where a folder is, or could be made."""

from __future__ import annotations

import os
from pathlib import Path


def unreachable(path: str | Path) -> str | None:
    """Why the system can't say what is at `path`; None where it can, also that nothing is there.

    A loop of links, a name too long, a folder that may not be looked into, a mount that doesn't answer, and the like.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return error.strerror or type(error).__name__
    except ValueError as error:  # of characters that no path has
        return str(error)
    return None


def existing_parent(folder: Path) -> Path:
    """`folder` itself, or its nearest ancestor that exists: where it would be made. Raises `OSError`."""
    absolute = folder.absolute()
    return next(path for path in (absolute, *absolute.parents) if path.exists())


def file_in_the_way(folder: Path) -> Path | None:
    """The file at `folder` or above it that keeps it from being a folder; None when nothing does. Raises `OSError`."""
    place = existing_parent(folder)
    return None if place.is_dir() else place
