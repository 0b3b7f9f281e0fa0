"""The reports of `vime queue` as tables."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.text import Text

from pipeline.dead_list import DeadList, DeadRow
from pipeline.task_list import LeaseList, TaskList
from recovery.queue_report import BranchReport, HistoryReport, SegmentReport, StatusReport, VersionsReport
from storage.holder import CoordinatorView
from vime.cli.look import duration, first_of, moment, num_bytes, one_line, place_words, position_words, span, table
from vime.counted import counted


def status(report: StatusReport) -> RenderableType:
    """`vime queue status`."""
    session = "not running" if report.driver_pid is None else f"running, process {report.driver_pid} of this host"
    commit = "none" if report.newest_commit is None else f"of rollout {report.newest_commit}"
    letters = ", ".join(f"{count} {reason}" for reason, count in sorted(report.dead_letters.items())) or "none"
    rows = [
        ("run", f"{report.run} ({session})"),
        ("coordinator", _coordinator(report.coordinator)),
        ("groups", str(report.identity)),
        ("in flight", _in_flight(report)),
        ("not begun", counted(report.num_fresh, "prompt")),
        ("pending versions", span(report.pending_versions)),
        ("trained", f"{_trained(report)}; newest commit: {commit}"),
        ("dead letters", letters),
        ("segments", f"{report.num_open_segments} open, {report.num_closed_segments} closed"),
        (
            "disk",
            f"{num_bytes(report.pool_bytes)} in {report.pool}; "
            f"{num_bytes(report.free_bytes)} of {num_bytes(report.total_bytes)} free",
        ),
    ]
    if report.unreadable_groups:
        rows.append(
            ("unreadable", f"pending groups {first_of(report.unreadable_groups)}: run `vime audit {report.run}`")
        )
    shown = table(("", ""), rows)
    shown.show_header = False
    return shown


def tasks(found: TaskList) -> RenderableType:
    """`vime queue tasks`."""
    rows = [
        (
            row.group_index,
            row.state if row.reason is None else f"{row.state} ({row.reason})",
            row.attempt,
            row.worker or position_words(row.position),
            span(row.versions),
            " ".join("-" if reward is None else f"{reward:g}" for reward in row.rewards) or None,
            place_words(row.prompt)
            + ("" if row.requeued_from is None else f" (again, after group {row.requeued_from})"),
        )
        for row in found.tasks
    ]
    columns = ("group", "state", "attempt", "worker or position", "versions", "rewards", "prompt")
    parts: list[RenderableType] = [table(columns, rows, right=("group", "attempt", "worker or position"))]
    if found.num_matching > len(found.tasks):
        parts.append(Text(f"{len(found.tasks)} of {found.num_matching} groups; --limit shows more."))
    if found.num_closed_segments_left_out:
        parts.append(Text(f"{found.num_closed_segments_left_out} closed segments are left out; --closed adds them."))
    return Group(*parts)


def leases(found: LeaseList) -> RenderableType:
    """`vime queue leases`."""
    if not found.leases:
        return Text("No group is leased.")
    rows = [
        (
            row.group_index,
            row.worker,
            row.attempt,
            None if row.age_s is None else duration(row.age_s),
            None if row.heartbeat_age_s is None else duration(row.heartbeat_age_s),
            place_words(row.prompt),
        )
        for row in found.leases
    ]
    numbers = ("group", "attempt", "age", "last heartbeat")
    shown = table(("group", "worker", "attempt", "age", "last heartbeat", "prompt"), rows, right=numbers)
    if found.coordinator_alive is not False:
        return shown
    return Group(
        shown, Text("The coordinator has ended, so these leases are stale: a start hands their groups out again.")
    )


def dead(found: DeadList, *, traces: bool) -> RenderableType:
    """`vime queue dead`."""
    if not found.reasons and not found.unreadable:
        return Text("No sample has failed.")
    reasons = [(count.reason, count.num_groups_dropped, count.num_letters) for count in found.reasons]
    parts: list[RenderableType] = [
        table(("reason", "groups dropped", "letters"), reasons, right=("groups dropped", "letters")),
        Text(""),
    ]
    parts += [_letter(row) for row in found.letters] if traces else [_letters(found)]
    if found.num_matching > len(found.letters):
        parts.append(Text(f"{len(found.letters)} of {found.num_matching} letters; --limit shows more."))
    parts += [Text(f"Unreadable: {problem}") for problem in found.unreadable]
    return Group(*parts)


def versions(report: VersionsReport) -> RenderableType:
    """`vime queue versions`."""
    rows = [
        (
            row.version,
            row.num_groups,
            row.num_pending,
            row.num_trained,
            None if row.mean_age_versions is None else f"{row.mean_age_versions:.2f}",
            row.num_spanning_samples,
            span((row.rollouts[0], row.rollouts[-1])) if row.rollouts else None,
        )
        for row in report.versions
    ]
    columns = ("version", "groups", "pending", "trained", "mean age", "spanning samples", "planned rollouts")
    parts: list[RenderableType] = [
        table(columns, rows, right=columns),
        Text(
            "version: of a group's oldest token; mean age: versions from then to its training; planned rollouts: "
            "batches planned while the version was the newest, whatever version their groups are of."
        ),
    ]
    if report.unreadable_groups:
        parts.append(Text(f"{len(report.unreadable_groups)} groups are not counted: their payload can't be read."))
    if report.num_closed_segments_left_out:
        parts.append(Text(f"{report.num_closed_segments_left_out} closed segments are left out; --closed adds them."))
    return Group(*parts)


def history(report: HistoryReport) -> RenderableType:
    """`vime queue history`."""
    branches = [_branch(branch) for branch in report.branches]
    segments = [_segment(segment) for segment in report.segments]
    names = ("branch", "grew from", "start version", "rollouts", "groups trained", "rolled back", "committed rollouts")
    parts: list[RenderableType] = [
        table(names, branches, right=("start version", "groups trained", "rolled back")),
        Text(""),
        table(
            ("segment", "state", "first group", "groups", "accepted", "dropped", "journal"),
            segments,
            right=("segment", "first group", "groups", "accepted", "journal"),
        ),
    ]
    return Group(*parts, *(Text(f"Cut: {one_line(line)}") for line in report.repairs))


def _in_flight(report: StatusReport) -> str:
    oldest = "" if report.oldest_lease_s is None else f" (the oldest for {duration(report.oldest_lease_s)})"
    return f"{report.num_leased} leased{oldest}, {report.num_waiting} waiting for another attempt"


def _trained(report: StatusReport) -> str:
    if report.branch is None:
        return "nothing: no session has begun a branch"
    return f"{counted(report.rollouts_trained, 'rollout')} on branch {report.branch}"


def _coordinator(view: CoordinatorView | None) -> str:
    if view is None:
        return "never had one"
    began, age = moment(view.since), duration(time.time() - view.since)
    state = {
        True: f"alive since {began} ({age})",
        False: f"ended; it began {began} ({age} ago)",
        None: f"on another host, where it began {began} ({age} ago)",
    }[view.alive]
    return f"epoch {view.epoch}, {view.owner!r}, process {view.pid} on {view.host}: {state}"


def _letters(found: DeadList) -> RenderableType:
    rows = [
        (
            moment(row.letter.time_s),
            row.letter.group_index,
            row.letter.attempt,
            " ".join(map(str, row.letter.sample_indices)) or None,
            row.letter.reason,
            row.state if row.requeued_as is None else f"{row.state}, requeued as {row.requeued_as}",
            one_line(row.letter.message),
        )
        for row in found.letters
    ]
    columns = ("time", "group", "attempt", "samples", "reason", "group is", "message")
    return table(columns, rows, right=("group", "attempt"))


def _letter(row: DeadRow) -> RenderableType:
    letter = row.letter
    samples = ", ".join(map(str, letter.sample_indices)) or "none"
    head = (
        f"{moment(letter.time_s)}  group {letter.group_index} ({row.state}), samples {samples}, attempt "
        f"{letter.attempt}, {letter.worker}: {letter.reason}"
    )
    return Text(f"{head}\n{letter.message}\n{letter.traceback or ''}")


def _branch(branch: BranchReport) -> tuple[object, ...]:
    parent = None if branch.parent_branch is None else f"{branch.parent_branch}, rollout {branch.parent_rollout}"
    return (
        branch.branch,
        parent,
        branch.start_version,
        span(branch.rollouts),
        branch.num_groups_trained,
        branch.num_groups_rolled_back,
        " ".join(map(str, branch.commits)) or None,
    )


def _segment(segment: SegmentReport) -> tuple[object, ...]:
    return (
        segment.index,
        "open" if segment.open else "closed",
        segment.first_group,
        segment.num_groups,
        segment.num_accepted,
        ", ".join(f"{count} {reason}" for reason, count in sorted(segment.dropped.items())) or "0",
        None if segment.journal_bytes is None else num_bytes(segment.journal_bytes),
    )
