"""What of a run a replay needs, read off its folder and pool; nothing of them is changed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipeline.messages import decode
from pipeline.planner import BatchPlan
from pipeline.run_folder import session_settings
from pipeline.step_results import Layout, RolloutResult, read_results
from recovery.branch import ancestry
from recovery.branch_line import BranchLine
from recovery.commit import commit_path, read_commit
from recovery.replay_line import TrainedRollout, replay_line
from recovery.run_location import RunLocation
from storage.pool import Pool
from storage.queue_view import QueueView
from vime.errors import CommitError, NoRunError, StorageError, reason_of
from vime.settings.groups import Settings


@dataclass(frozen=True)
class StoredRollout:
    """One rollout batch as the run trained it."""

    plan: BatchPlan
    results: list[RolloutResult]
    """What each rank logged of it; empty when the run died before."""

    @property
    def rollout_id(self) -> int:
        return self.plan.rollout_id


@dataclass(frozen=True)
class ReplaySource:
    """A rollout, what leads to it, and the settings that it was trained with."""

    pool: Path
    run_id: str
    settings: Settings
    """Of the session that trained the rollout."""
    commit: tuple[Path, int] | None
    """Folder and rollout of the commit to start from, verified; None: the weights that the run began with."""
    rollouts: list[StoredRollout]
    """The wanted one last."""

    @property
    def layout(self) -> Layout | None:
        """That of rank 0 in the last logged rollout."""
        return next((stored.results[0].layout for stored in reversed(self.rollouts) if stored.results), None)


def read_source(location: RunLocation, rollout_id: int, branch: str | None = None) -> ReplaySource:
    """Find what trains a rollout again; `branch` defaults to the session whose rollout counts.

    Raises:
        NoRunError: the rollout was not trained, or what it was trained on isn't there any more.
        CommitError: a file of the commit is missing or differs.
    """
    control = QueueView(location.pool).control_dir
    line = BranchLine(location.root, control)
    tip = line.tip if branch is None else branch
    known = [item.branch for item in line.branches]
    if tip is None or tip not in known:
        raise NoRunError(
            f"Session {branch} is none of this run's: {', '.join(known) or 'it has none'}.",
            next_step="`vime queue history RUN` lists them.",
        )
    trained = frozenset(TrainedRollout(record.branch, record.step) for record in line.records)
    commits = {item.branch: line.commits_of(item) for item in line.branches}
    wanted = replay_line(ancestry(line.branches, tip), commits, trained, rollout_id)
    folders = {item.branch: location.root / item.directory for item in line.branches}
    commit = None
    if wanted.commit is not None:
        commit = (folders[wanted.commit.branch], wanted.commit.rollout_id)
        _check_commit(*commit)
    plans = {record.batch_id: record.plan_ref for record in line.plans}
    stored = []
    with Pool.open(location.pool) as pool:
        for item in wanted.rollouts:
            ref = plans.get(f"batch:{item.branch}:{item.rollout_id}")
            try:
                plan = None if ref is None else decode(pool.read_blob(ref), BatchPlan)
            except StorageError as error:
                raise _gone(item.rollout_id, error) from error
            if plan is None:
                raise NoRunError(f"The plan of rollout {item.rollout_id} is not recorded.", next_step="Choose another.")
            _check_payloads(pool, plan)
            stored.append(StoredRollout(plan, read_results(location.root, item.branch, [item.rollout_id])))
        run_id = pool.run_id
    settings = read_session_settings(location.root, wanted.rollouts[-1].branch)
    return ReplaySource(location.pool, run_id, settings, commit, stored)


def read_session_settings(root: Path, branch: str) -> Settings:
    """Settings that a session was started with. Raises `NoRunError`."""
    own = session_settings(root, branch)
    path = own if own.exists() else root / "settings.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Settings)
    except (OSError, msgspec.MsgspecError) as error:
        raise NoRunError(
            f"The settings of the run can't be read from {path}: {reason_of(error)}.", next_step="Restore the file."
        ) from error


def with_threads(settings: Settings, layout: Layout | None) -> Settings:
    """The settings with as many threads a rank as the run used, unless they say how many."""
    if layout is None or settings.trainer.trainer_num_threads is not None:
        return settings
    trainer = dataclasses.replace(settings.trainer, trainer_num_threads=int(layout["threads"]))
    return dataclasses.replace(settings, trainer=trainer)


def _check_commit(directory: Path, rollout_id: int) -> None:
    """Compare the commit with its digests. Raises `CommitError`."""
    try:
        read_commit(commit_path(directory, rollout_id))
    except CommitError as error:
        raise CommitError(
            error.message,
            next_step=f"Restore the file, or choose rollout {rollout_id} or one before it: these need an older commit.",
        ) from error


def _check_payloads(pool: Pool, plan: BatchPlan) -> None:
    """Before anything is trained: every group's header can be read."""
    for group in plan.groups:
        try:
            pool.read_header(group.ref)
        except StorageError as error:
            raise _gone(plan.rollout_id, error) from error


def _gone(rollout_id: int, error: StorageError) -> NoRunError:
    return NoRunError(
        f"What rollout {rollout_id} was trained on can't be read: {error.message}",
        next_step="With --rollout-queue-online-gc only what kept commits and archives need stays; choose a later "
        "rollout, or restore the file.",
    )
