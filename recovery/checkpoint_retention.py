"""Which commits a run keeps, and the removal of the others."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recovery.branch import Branch, read_branches
from recovery.commit import commit_path, committed_rollouts, iteration_directory, queue_state_path
from recovery.commit_lock import removing_commit
from recovery.run_on_disk import commit_folders, folders_below
from storage.files import sync_directory
from storage.os_errors import os_error


@dataclass(frozen=True)
class Keeping:
    """How many commits of each folder stay."""

    newest: int | None = None
    """So many newest ones; None: all."""
    every: int | None = None
    """And those after each so many rollout batches, for good."""

    def holds(self, commits: Sequence[int]) -> dict[int, str]:
        """Rollout -> why it stays, of the commits of one folder, ascending."""
        if self.newest is None:
            return dict.fromkeys(commits, "all are kept")
        held = dict.fromkeys(commits[-self.newest :], f"one of the newest {self.newest}")
        every = [] if self.every is None else [rollout for rollout in commits if (rollout + 1) % self.every == 0]
        return {**dict.fromkeys(every, f"every {self.every}"), **held}


def forks(commits: Mapping[str, Sequence[int]], branches: Sequence[Branch]) -> dict[tuple[str, int], str]:
    """(folder, rollout) -> branch that began there and has no commit of its own yet, so that it needs that one."""
    directories = {branch.branch: branch.directory for branch in branches}
    needed = {}
    for branch in branches:
        if branch.parent is None or branch.parent.branch not in directories:
            continue
        fork = branch.parent.rollout_id
        if not any(rollout > fork for rollout in commits.get(branch.directory, [])):
            needed[directories[branch.parent.branch], fork] = branch.branch
    return needed


def remove_commits(run: Path, keeping: Keeping, output: str = ".") -> list[Path]:
    """Remove the commits of a run that nothing keeps, in and below the folder `output`; the records of those removed.

    `output` is named as in `recovery.run_on_disk`. What lies elsewhere is of sessions with a --save of their own.

    A record goes first and its checkpoint after it, so that a kill leaves no record without its files; the next call
    removes what is left. The state of the queue stays: it is small, and later branches are counted from it. A commit
    that somebody reads stays until a later call. Raises `StorageError`.
    """
    if keeping.newest is None:
        return []
    commits = {folder: committed_rollouts(run / folder) for folder in commit_folders(run)}
    needed = forks(commits, read_branches(run))
    removed = []
    for folder in folders_below(output, commits):
        rollouts = commits[folder]
        kept = {*keeping.holds(rollouts), *(rollout for name, rollout in needed if name == folder)}
        for rollout in rollouts:
            record = commit_path(run / folder, rollout)
            if rollout not in kept and _remove_record(record):
                removed.append(record)
        _remove_checkpoints_without_record(run / folder)
    return removed


def _remove_record(record: Path) -> bool:
    try:
        with removing_commit(record) as is_free:
            if is_free:
                record.unlink()
                sync_directory(record.parent)
            return is_free
    except OSError as error:
        raise os_error(error, record, 0) from error


def _remove_checkpoints_without_record(folder: Path) -> None:
    """Checkpoints that were commits, or would have become one, from before the newest commit."""
    rollouts = committed_rollouts(folder)
    for checkpoint in sorted(folder.glob("iter_*")):
        number = checkpoint.name.removeprefix("iter_")
        if not number.isdigit() or not rollouts or int(number) >= rollouts[-1] or int(number) in rollouts:
            continue
        rollout = int(number)
        if checkpoint == iteration_directory(folder, rollout) and queue_state_path(folder, rollout).exists():
            try:
                shutil.rmtree(checkpoint)
            except OSError as error:
                raise os_error(error, checkpoint, 0) from error
