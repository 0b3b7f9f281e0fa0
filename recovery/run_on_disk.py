"""What a run folder holds, as far as the restore plan asks: names and small files only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recovery.branch import Branch, read_branches
from recovery.commit import committed_rollouts
from recovery.pointer import Tracker, read_tracker


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


def scan_run(run: Path, queue_root: Path) -> RunOnDisk:
    """Read what a run folder and its queue hold. Raises `RestoreError` for damaged records."""
    folders = commit_folders(run)
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
    elsewhere = {branch.directory for branch in read_branches(run) if Path(branch.directory).is_absolute()}
    return [".", *sorted(inside), *sorted(elsewhere)]


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
