"""Whether a run could write where its flags say; looks only, writes nothing."""

from __future__ import annotations

from pathlib import Path

from storage.preflight import not_writable
from vime.errors import SettingsError, VimeError
from vime.settings.groups import Settings


def written_folders(settings: Settings) -> dict[str, Path]:
    """Flag -> folder that the run writes to, of those that are given."""
    given = {"--save": settings.checkpoint.save, "--rollout-data-dir": settings.queue.rollout_data_dir}
    return {flag: Path(folder) for flag, folder in given.items() if folder is not None}


def folder_problems(settings: Settings) -> list[VimeError]:
    """A problem for each folder that can't be written to."""
    return [
        SettingsError(
            f"{flag} {folder}: nothing can be written there: {reason}.",
            next_step=f"Name another folder with {flag}, or correct its rights.",
        )
        for flag, folder in written_folders(settings).items()
        if (reason := not_writable(folder)) is not None
    ]
