"""What `vime runs` tells: the sessions of a run, their commits, and what keeps each of those."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from recovery.branch import Branch
from recovery.checkpoint_retention import Keeping, forks
from recovery.commit import CommitRecord, commit_path, iteration_directory, read_commit, read_record
from recovery.commit_lock import is_read
from recovery.pointer import read_tracker
from recovery.run_location import RunLocation
from recovery.run_on_disk import RunOnDisk, folders_below, output_of_newest, scan_run
from storage.queue_view import QueueView
from storage.retention import Retention
from vime.errors import CommitError


class CommitReport(msgspec.Struct, frozen=True):
    """One commit."""

    rollout_id: int
    directory: str
    branch: str | None
    """Session that wrote it; None where its record can't be read."""
    num_bytes: int
    weight_version: int | None
    held_by: list[str]
    """tracker, a number of newest ones, every so many, a branch, a reader; empty: the next commit removes it."""
    problem: str | None
    """Why one can't go on from it, as far as was looked; None: nothing was found."""


class SessionReport(msgspec.Struct, frozen=True):
    """One session of the run."""

    branch: str
    parent_branch: str | None
    parent_rollout: int | None
    directory: str
    commits: list[CommitReport]


class OwnerReport(msgspec.Struct, frozen=True):
    """Who keeps samples in the pool beside the queue: debug archives."""

    owner: str
    num_packs: int


class RunsReport(msgspec.Struct, frozen=True):
    """`vime runs`."""

    run: str
    sessions: list[SessionReport]
    """In the order they began."""
    other_commits: list[CommitReport]
    """Of sessions that are not on record."""
    unfinished: list[str]
    """Checkpoints without a commit record."""
    archives: list[OwnerReport]
    num_leased: int
    """Groups that are being generated: their samples so far are kept."""


def runs_report(location: RunLocation, keeping: Keeping, *, verify: bool = False) -> RunsReport:
    """Read the commits of a run; with `verify` every file of each is compared with its digest.

    Raises `RestoreError` for damaged records of branches or trackers, `StorageError` for those of the queue.
    """
    disk = scan_run(location.root, location.pool)
    needed = forks(disk.commits, disk.branches)
    tended = folders_below(output_of_newest(disk), disk.commits)
    commits = [
        _commit(location.root, folder, rollout, holds, verify)
        for folder, rollouts in disk.commits.items()
        for own in [keeping if folder in tended else None]
        for holds in [_holds(location.root, folder, rollouts, own, needed)]
        for rollout in rollouts
    ]
    known = {branch.branch for branch in disk.branches}
    return RunsReport(
        run=str(location.root),
        sessions=[_session(branch, commits) for branch in disk.branches],
        other_commits=[commit for commit in commits if commit.branch not in known],
        unfinished=list(disk.unfinished),
        archives=_archives(location) if location.has_queue else [],
        num_leased=_num_leased(location, disk),
    )


def _session(branch: Branch, commits: list[CommitReport]) -> SessionReport:
    parent = branch.parent
    return SessionReport(
        branch=branch.branch,
        parent_branch=None if parent is None else parent.branch,
        parent_rollout=None if parent is None else parent.rollout_id,
        directory=branch.directory,
        commits=[commit for commit in commits if commit.branch == branch.branch],
    )


def _holds(
    run: Path, folder: str, rollouts: list[int], keeping: Keeping | None, needed: Mapping[tuple[str, int], str]
) -> dict[int, list[str]]:
    """Rollout -> what keeps its commit; `keeping` None where the newest session removes nothing."""
    held: dict[int, list[str]] = {rollout: [] for rollout in rollouts}
    text = read_tracker(run / folder).text
    if text is not None and text.isdigit() and int(text) in held:
        held[int(text)].append("tracker")
    others = dict.fromkeys(rollouts, "another --save")
    for rollout, why in (others if keeping is None else keeping.holds(rollouts)).items():
        held[rollout].append(why)
    for (name, rollout), branch in needed.items():
        if name == folder and rollout in held:
            held[rollout].append(f"branch {branch}")
    for rollout in rollouts:
        if is_read(commit_path(run / folder, rollout)):
            held[rollout].append("reader")
    return held


def _commit(run: Path, folder: str, rollout: int, holds: Mapping[int, list[str]], verify: bool) -> CommitReport:
    path = commit_path(run / folder, rollout)
    record: CommitRecord | None = None
    found = None
    try:
        record = read_record(path)
        if verify:
            read_commit(path)
        else:
            found = _missing(run / folder, record)
    except CommitError as error:
        found = error.message
    checkpoint = iteration_directory(run / folder, rollout)
    return CommitReport(
        rollout_id=rollout,
        directory=folder,
        branch=None if record is None else record.branch,
        num_bytes=sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()),
        weight_version=None if record is None else record.weight_version,
        held_by=holds[rollout],
        problem=found,
    )


def _missing(folder: Path, record: CommitRecord) -> str | None:
    """The first file that is absent or has another size."""
    for name, expected in record.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected.size:
            return f"{name} has {path.stat().st_size} bytes, expected {expected.size}"
    return None


def _archives(location: RunLocation) -> list[OwnerReport]:
    owners = Retention(location.pool / "vime").owners()
    return [OwnerReport(owner, len(packs)) for owner, packs in sorted(owners.items())]


def _num_leased(location: RunLocation, disk: RunOnDisk) -> int:
    if not disk.has_queue:
        return 0
    return sum(group.state == "leased" for segment in QueueView(location.pool).opened for group in segment.groups())
