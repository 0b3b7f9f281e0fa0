"""What `vime queue` tells of a run: plain structs, read off the disk."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import msgspec

from recovery.accounting import Identity, count_identity
from recovery.branch import Branch
from recovery.branch_line import BranchLine
from recovery.run_location import RunLocation
from storage.columns import summary_from_header
from storage.dead_letters import read_letters
from storage.holder import CoordinatorView, read_coordinator
from storage.lease_board import read_lease_times
from storage.pool import Pool
from storage.positions import PositionRanges
from storage.queue_view import GroupView, QueueView
from storage.step_log import TrainedRecord
from storage.summary import GroupSummary
from vime.errors import StorageError


class SegmentReport(msgspec.Struct, frozen=True):
    """One segment of the queue."""

    index: int
    queue_id: str
    open: bool
    first_group: int
    num_groups: int
    num_accepted: int
    dropped: dict[str, int]
    journal_bytes: int | None
    """None where its journal was not read."""


class StatusReport(msgspec.Struct, frozen=True):
    """`vime queue status`."""

    run: str
    pool: str
    time_s: float
    """Unix seconds at which it was read."""
    driver_pid: int | None
    """The session that is running on this host, if any."""
    coordinator: CoordinatorView | None
    branch: str | None
    newest_commit: int | None
    """Rollout of the newest commit on the disk."""
    rollouts_trained: int
    """Along the newest branch."""
    identity: Identity
    holds: bool
    num_leased: int
    oldest_lease_s: float | None
    """Age of the oldest lease; None when there is none, or none was noted."""
    num_waiting: int
    """Leased before, waiting to be leased again; with the leased ones: in flight."""
    num_fresh: int
    pending_versions: tuple[int, int] | None
    """Oldest and newest policy version among the groups that wait to be trained."""
    unreadable_groups: list[int]
    """Of those, the ones whose payload can't be read."""
    dead_letters: dict[str, int]
    """Reason -> letters; groups that succeeded at another attempt have some too."""
    num_open_segments: int
    num_closed_segments: int
    pool_bytes: int
    free_bytes: int
    total_bytes: int


class VersionReport(msgspec.Struct, frozen=True):
    """One policy version, counted over the groups of the segments that were read."""

    version: int
    num_groups: int
    """Accepted groups whose oldest token it made."""
    num_pending: int
    num_trained: int
    num_spanning_samples: int
    """Their samples with tokens of newer versions too."""
    mean_age_versions: float | None
    """Of the trained ones: version at their training minus this one."""
    rollouts: list[int]
    """Rollout batches planned under it, along the newest branch."""


class VersionsReport(msgspec.Struct, frozen=True):
    """`vime queue versions`."""

    versions: list[VersionReport]
    unreadable_groups: list[int]
    """Accepted groups that are not counted, since their payload can't be read (it may be collected once trained)."""
    num_closed_segments_left_out: int


class BranchReport(msgspec.Struct, frozen=True):
    """One session of the run."""

    branch: str
    parent_branch: str | None
    parent_rollout: int | None
    start_version: int
    rollouts: tuple[int, int] | None
    """First and last rollout that it trained."""
    num_groups_trained: int
    num_groups_rolled_back: int
    """Of these, trained after the commit that a later session resumed from."""
    commits: list[int]


class HistoryReport(msgspec.Struct, frozen=True):
    """`vime queue history`."""

    branches: list[BranchReport]
    segments: list[SegmentReport]
    repairs: list[str]
    """What was cut off damaged journals."""


def status(location: RunLocation) -> StatusReport:
    """The state of the queue. Raises `StorageError`."""
    view = QueueView(location.pool)
    lineage = BranchLine(location.root, view.control_dir)
    groups = [group for segment in view.opened for group in segment.groups()]
    identity = count_identity(view.facts(), lineage.trained, lineage.reclaimed)
    states = Counter(group.state for group in groups)
    gone = PositionRanges([*lineage.trained.ranges(), *lineage.reclaimed.ranges()])
    pending = [group for group in groups if group.position is not None and group.position not in gone]
    known, unreadable = summaries(location, pending)
    usage = shutil.disk_usage(location.pool)
    return StatusReport(
        run=str(location.root),
        pool=str(location.pool),
        time_s=time.time(),
        driver_pid=location.driver(),
        coordinator=read_coordinator(view.control_dir),
        branch=lineage.tip,
        newest_commit=max((rollout for rollouts in lineage.commits.values() for rollout in rollouts), default=None),
        rollouts_trained=len(lineage.steps),
        identity=identity,
        holds=identity.holds,
        num_leased=states["leased"],
        oldest_lease_s=_oldest_lease_s(view, groups),
        num_waiting=states["waiting"],
        num_fresh=states["fresh"],
        pending_versions=_version_range(known.values()),
        unreadable_groups=unreadable,
        dead_letters=dict(Counter(letter.reason for letter in read_letters(location.dead_letters)[0])),
        num_open_segments=len(view.opened),
        num_closed_segments=len(view.entries) - len(view.opened),
        pool_bytes=_bytes_below(location.pool),
        free_bytes=usage.free,
        total_bytes=usage.total,
    )


def versions(location: RunLocation, *, closed: bool) -> VersionsReport:
    """Policy versions, ascending, over open segments or, with `closed`, all. Reads one header a group."""
    view = QueueView(location.pool)
    lineage = BranchLine(location.root, view.control_dir)
    segments = view.all_segments() if closed else view.opened
    accepted = [group for segment in segments for group in segment.groups() if group.position is not None]
    known, unreadable = summaries(location, accepted)
    members: dict[int, list[tuple[GroupView, GroupSummary]]] = defaultdict(list)
    for group in accepted:
        if group.group_index in known and (oldest := oldest_version(known[group.group_index])) is not None:
            members[oldest].append((group, known[group.group_index]))
    rollouts: dict[int, list[int]] = defaultdict(list)
    for record in lineage.steps:
        rollouts[record.version].append(record.step)
    reports = [
        _version_report(version, members[version], lineage, rollouts[version])
        for version in sorted({*members, *rollouts})
    ]
    return VersionsReport(reports, unreadable, len(view.entries) - len(segments))


def history(location: RunLocation) -> HistoryReport:
    """Sessions, segments and repairs. Raises `StorageError`."""
    view = QueueView(location.pool)
    lineage = BranchLine(location.root, view.control_dir)
    by_branch: dict[str, list[TrainedRecord]] = defaultdict(list)
    for record in lineage.records:
        by_branch[record.branch].append(record)
    repairs = view.control_dir / "repairs.jsonl"
    return HistoryReport(
        branches=[_branch_report(branch, by_branch[branch.branch], lineage) for branch in lineage.branches],
        segments=[_segment_report(view, index) for index in range(len(view.entries))],
        repairs=repairs.read_text().splitlines() if repairs.exists() else [],
    )


def oldest_version(summary: GroupSummary) -> int | None:
    """Policy version of a group's oldest token, None when nothing was sampled."""
    return min((version for version in summary.min_versions if version is not None), default=None)


def summaries(location: RunLocation, groups: Iterable[GroupView]) -> tuple[dict[int, GroupSummary], list[int]]:
    """Group index -> summary from its header, and the groups whose payload can't be read.

    Once a group is trained, its payload may be collected.
    """
    found: dict[int, GroupSummary] = {}
    unreadable: list[int] = []
    with Pool.open(location.pool) as pool:
        for group in groups:
            if group.result_ref is not None:
                try:
                    found[group.group_index] = summary_from_header(pool.read_header(group.result_ref))
                except StorageError:
                    unreadable.append(group.group_index)
    return found, unreadable


def _oldest_lease_s(view: QueueView, groups: Iterable[GroupView]) -> float | None:
    times = read_lease_times(view.control_dir)
    began = [times[g.attempt_id].leased_at for g in groups if g.attempt_id is not None and g.attempt_id in times]
    return time.time() - min(began) if began else None


def _version_range(known: Iterable[GroupSummary]) -> tuple[int, int] | None:
    seen = [v for summary in known for v in (*summary.min_versions, *summary.max_versions) if v is not None]
    return (min(seen), max(seen)) if seen else None


def _version_report(
    version: int, members: list[tuple[GroupView, GroupSummary]], lineage: BranchLine, rollouts: list[int]
) -> VersionReport:
    trained = [p for group, _ in members if (p := group.position) is not None and p in lineage.trained]
    ages = [lineage.version_of[position] - version for position in trained if position in lineage.version_of]
    return VersionReport(
        version=version,
        num_groups=len(members),
        num_pending=len(members) - len(trained),
        num_trained=len(trained),
        num_spanning_samples=sum(summary.num_spanning_samples for _, summary in members),
        mean_age_versions=sum(ages) / len(ages) if ages else None,
        rollouts=sorted(rollouts),
    )


def _branch_report(branch: Branch, records: list[TrainedRecord], lineage: BranchLine) -> BranchReport:
    rollouts = sorted(record.step for record in records)
    undone = [record for record in records if not lineage.counts(record.branch, record.step)]
    return BranchReport(
        branch=branch.branch,
        parent_branch=None if branch.parent is None else branch.parent.branch,
        parent_rollout=None if branch.parent is None else branch.parent.rollout_id,
        start_version=branch.start_version,
        rollouts=(rollouts[0], rollouts[-1]) if rollouts else None,
        num_groups_trained=sum(len(record.positions) for record in records),
        num_groups_rolled_back=sum(len(record.positions) for record in undone),
        commits=lineage.commits_of(branch),
    )


def _segment_report(view: QueueView, index: int) -> SegmentReport:
    entry = view.entries[index]
    if entry.summary is not None:
        return SegmentReport(
            index, entry.queue_id, False, entry.cursor.next_group_index, entry.summary.num_groups,
            entry.summary.num_accepted, entry.summary.dropped, None,
        )  # fmt: skip
    segment = view.segment(index)
    groups = list(segment.groups())
    return SegmentReport(
        index, entry.queue_id, True, entry.cursor.next_group_index, len(groups),
        sum(group.position is not None for group in groups),
        dict(Counter(group.reason for group in groups if group.reason is not None)), segment.replay.journal_bytes,
    )  # fmt: skip


def _bytes_below(folder: Path) -> int:
    """Size of all files of a folder that others are writing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:
                continue  # gone since the folder was listed
    return total
