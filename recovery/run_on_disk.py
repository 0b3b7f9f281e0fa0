"""What a run folder holds, as far as the restore plan asks: names and small files only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recovery.branch import Branch, read_branches
from recovery.commit import committed_rollouts
from recovery.pointer import Tracker, read_tracker
from vime.errors import RestoreError


@dataclass(frozen=True)
class RunOnDisk:
    """A folder is named relative to the run folder where it lies in it, else by its whole path."""

    has_queue: bool
    branches: Sequence[Branch]
    commits: Mapping[str, list[int]]
    """Folder with commits -> their rollouts, ascending."""
    unfinished: Sequence[str] = ()
    """Checkpoints without a commit record, and what else looks like one."""
    trackers: Mapping[str, Tracker] = field(default_factory=dict)
    """By folder."""


def scan_run(run: Path, queue_root: Path, output: str = ".") -> RunOnDisk:
    """Read what a run folder and its queue hold.

    Raises:
        RestoreError: a damaged record; or the folder for commits, `output`, holds some that the run doesn't know there.
    """
    folders = commit_folders(run)
    if output not in folders and (unknown := committed_rollouts(run / output)):
        others = ", ".join(folder for folder in folders if Path(folder).is_absolute()) or "no other folder"
        raise RestoreError(
            f"{output} holds commits (rollout {unknown[-1]} is the newest) that the run in {run} does not know there; "
            f"it knows {others}.",
            next_step="If the folder was moved, move it back or make a link; else give an empty --save.",
        )
    commits = {folder: rollouts for folder in folders if (rollouts := committed_rollouts(run / folder))}
    return RunOnDisk(
        has_queue=(queue_root / "vime" / "queue.json").exists(),
        branches=read_branches(run),
        commits=commits,
        unfinished=[name for folder in folders for name in _unfinished(run, folder, commits.get(folder, []))],
        trackers={folder: read_tracker(run / folder) for folder in folders},
    )


def commit_folders(run: Path) -> list[str]:
    """Folders of a run that may hold commits."""
    branches = run / "branches"
    inside = [f"branches/{path.name}" for path in branches.iterdir()] if branches.is_dir() else []
    of_other_saves = {branch.directory for branch in read_branches(run)} - {".", *inside}
    return [".", *sorted(inside), *sorted(of_other_saves)]


def folders_below(output: str, folders: Iterable[str]) -> list[str]:
    """Those in which sessions commit whose folder for commits is `output`."""
    return [folder for folder in folders if is_below(folder, output)]


def output_of_newest(disk: RunOnDisk) -> str:
    """The folder for commits of the newest session."""
    newest = Path(disk.branches[-1].directory) if disk.branches else Path()
    if not newest.is_absolute():
        return "."
    return str(newest.parent.parent if newest.parent.name == "branches" else newest)


def is_below(directory: str, folder: str) -> bool:
    """Whether a folder is another or lies in it; what lies outside the run folder is not below `.`."""
    if folder == ".":
        return not Path(directory).is_absolute()
    return Path(directory).is_relative_to(folder)


def folder_name(folder: Path, run: Path) -> str:
    """The name of a folder in plans and branches."""
    folder, run = folder.resolve(), run.resolve()
    return str(folder.relative_to(run)) if folder.is_relative_to(run) else str(folder)


def _unfinished(run: Path, folder: str, committed: Sequence[int]) -> list[str]:
    path = run / folder
    if not path.is_dir():
        return []
    found = []
    for name in sorted(entry.name for entry in path.iterdir()):
        number = name.removeprefix("iter_")
        if number.isdigit() and int(number) not in committed:
            found.append(str(Path(folder) / name))
    return found
