"""The newest branch of a run with its ancestors, read off the disk: which steps count, and what they trained."""

from __future__ import annotations

import math
from pathlib import Path

from recovery.branch import Branch, ancestry, read_branches
from recovery.commit import committed_rollouts, read_queue_state
from storage.positions import PositionRanges
from storage.queue_types import PlanRecord
from storage.retention import Retention
from storage.step_log import TrainedRecord, read_step_log


class BranchLine:
    """The sessions of a run, and which of their steps the newest one builds on."""

    def __init__(self, run: Path, control_dir: Path) -> None:
        """Read branches, commits and the step log. Raises `StorageError`, `CommitError` or `RestoreError`."""
        self.branches = read_branches(run)
        self.tip = self.branches[-1].branch if self.branches else None
        self.commits = {b.directory: committed_rollouts(run / b.directory) for b in self.branches}
        """Folder of a branch -> rollouts that have a commit there, ascending."""
        log = read_step_log(control_dir)
        self.plans = [record for record in log if isinstance(record, PlanRecord)]
        self.records = [record for record in log if isinstance(record, TrainedRecord)]
        line = [] if self.tip is None else ancestry(self.branches, self.tip)
        self._last_rollout = {name: math.inf if last is None else last for name, last in line}
        self.steps = [record for record in self.records if self.counts(record.branch, record.step)]
        """Rollouts that count, in the order they were trained."""
        self.version_of = {position: record.version for record in self.steps for position in record.positions}
        """Position -> policy version under which it was trained."""
        self.trained = PositionRanges(_trained_before(run, self.branches))
        self.trained.update(self.version_of)
        self.reclaimed = Retention(control_dir).released.minus(self.trained)
        """Positions that other branches trained, and whose payloads may be gone."""

    def counts(self, branch: str, rollout_id: int) -> bool:
        """Whether a rollout of a branch was not rolled back by a later session."""
        return rollout_id <= self._last_rollout.get(branch, -1)

    def commits_of(self, branch: Branch) -> list[int]:
        """Rollouts of a branch's own commits, ascending."""
        first = 0 if branch.parent is None else branch.parent.rollout_id + 1
        last = max((record.step for record in self.records if record.branch == branch.branch), default=-1)
        return [rollout for rollout in self.commits[branch.directory] if first <= rollout <= last]


def _trained_before(run: Path, branches: list[Branch]) -> list[tuple[int, int]]:
    """What the commit that the newest branch grew from calls trained."""
    parent = branches[-1].parent if branches else None
    if parent is None:
        return []
    folder = next(branch.directory for branch in branches if branch.branch == parent.branch)
    return read_queue_state(run / folder, parent.rollout_id).trained
