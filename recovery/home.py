"""The folder in which a run lives, where its checkpoints go to another one."""

from __future__ import annotations

from pathlib import Path

import msgspec

from recovery.branch import branches_path, read_branches
from recovery.commit import committed_rollouts
from recovery.own_records import read_own_record
from storage.files import make_folder, write_atomically
from vime.errors import RestoreError


class Home(msgspec.Struct, frozen=True):
    """`rollout/home.json` of a folder that holds only checkpoints of a run."""

    run: str
    version: int = 1


def home_path(folder: Path) -> Path:
    return folder / "rollout" / "home.json"


def home_of(folder: Path) -> Path:
    """The run folder that a folder with commits belongs to: itself, that above `branches/`, or one elsewhere.

    Raises `RestoreError` for a damaged record.
    """
    path = home_path(folder)
    if path.is_file():
        return Path(read_own_record(path, Home).run)
    if folder.parent.name == "branches":
        return home_of(folder.parent.parent)
    return folder


def run_of(save: Path, load: Path | None) -> Path:
    """The run folder of a session that writes its commits to `save` and goes on with what `load` holds.

    They differ when `load` is a folder of a run and `save` holds none: the run stays where it is. A run that was moved
    takes the commits in `save` along when `load` names its new place.

    Raises:
        RestoreError: `save` belongs to another run than `load`, or to one that isn't there.
    """
    home = home_of(save)
    if load is None or not committed_rollouts(load):
        if not home.exists() and home != save:
            raise RestoreError(
                f"--save {save} holds commits of the run in {home}, which is not there.",
                next_step="Move the run back or mount its disk, or name its new place with --load.",
            )
        return home
    loaded = home_of(load.resolve())
    if loaded == home:
        return home
    was_moved = not branches_path(home).exists()
    if was_moved and str(save) in (branch.directory for branch in read_branches(loaded)):
        return loaded
    if home != save or branches_path(save).exists():
        raise RestoreError(
            f"--load {load} is of the run in {loaded}, and --save {save} holds the run in {home}.",
            next_step="Give a --save that holds no run yet, or leave out --load to go on with what --save holds.",
        )
    return loaded


def live_at(run: Path, save: Path) -> None:
    """Record that the commits in `save` are of the run in `run`."""
    if run != save:
        make_folder(home_path(save).parent)
        write_atomically(home_path(save), msgspec.json.encode(Home(str(run))))
