"""Whether a run could write where its flags say; looks only, writes nothing."""

from __future__ import annotations

from pathlib import Path

from pipeline.run_folder import RunFolder
from storage.disk_reserve import GIB, DiskReserve, Shortfall
from storage.preflight import not_writable
from vime.errors import SettingsError, StorageError, VimeError
from vime.folders import existing_parent
from vime.settings.groups import Settings

RESERVE_STEP = "Free space, put the queue on a larger disk, or lower --rollout-disk-reserve-gib."


def written_folders(settings: Settings) -> dict[str, Path]:
    """Flag -> folder that the run writes to, of those that are given."""
    given = {"--save": settings.checkpoint.save, "--rollout-data-dir": settings.queue.rollout_data_dir}
    return {flag: Path(folder) for flag, folder in given.items() if folder is not None}


def written_places(settings: Settings) -> dict[str, Path]:
    """Flag -> folder that the run writes to, of all that are given; that of a file for a file.

    Folders of trainer ranks and engines alone, which may be on other machines, are left out.
    """
    folders = {
        "--save-hf": settings.checkpoint.save_hf,
        "--dump-details": settings.debug.dump_details,
        "--wandb-dir": settings.logging.wandb_dir,
    }
    files = {"--save-debug-rollout-data": settings.debug.save_debug_rollout_data}
    placed = {flag: _before_placeholders(folder) for flag, folder in folders.items() if folder is not None}
    placed |= {flag: _before_placeholders(file, is_file=True) for flag, file in files.items() if file is not None}
    return {**written_folders(settings), **placed}


def _before_placeholders(path: str, *, is_file: bool = False) -> Path:
    """The folder that is the same for all that `{rollout_id}` and the like are filled in with."""
    fixed, brace, _ = path.partition("{")
    if brace:
        return Path(fixed) if fixed.endswith("/") else Path(fixed).parent
    return Path(fixed).parent if is_file else Path(fixed)


def not_writable_folders(settings: Settings) -> list[VimeError]:
    """A problem for each folder that nothing can be written to."""
    return [
        SettingsError(
            f"{flag} {folder}: nothing can be written there: {reason}.",
            next_step=f"Name another folder with {flag}, or correct its rights.",
        )
        for flag, folder in written_places(settings).items()
        if (reason := not_writable(folder)) is not None
    ]


def folder_problems(settings: Settings) -> list[VimeError]:
    """A problem for each folder that can't be written to; when all can, for a disk without its reserve."""
    problems = not_writable_folders(settings)
    if problems or (short := reserve_shortfall(settings)) is None:
        return problems
    return [StorageError(f"{short}: production would pause at once.", next_step=RESERVE_STEP)]


def reserve_shortfall(settings: Settings) -> Shortfall | None:
    """What the disk under the queue lacks of the reserve that is kept free; None when there is enough."""
    folder = RunFolder.of(settings)
    place = existing_parent(folder.step_log if settings.queue.is_in_memory else folder.queue)
    return DiskReserve(place, round(settings.queue.rollout_disk_reserve_gib * GIB)).shortfall()
