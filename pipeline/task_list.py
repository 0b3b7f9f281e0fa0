"""Groups one by one, for `vime queue tasks` and `vime queue leases`."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator

import msgspec

from pipeline.lineage import state_words
from pipeline.prompt_places import PromptPlace, prompt_places, read_prompts
from recovery.branch_line import BranchLine
from recovery.queue_report import summaries
from recovery.run_location import RunLocation
from storage.holder import read_coordinator
from storage.lease_board import read_lease_times
from storage.pool import Pool
from storage.queue_view import GroupView, QueueView

STATES = ("fresh", "leased", "waiting", "pending", "trained", "dropped", "reclaimed")


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """One group."""

    group_index: int
    segment: int
    state: str
    """One of `STATES`: waiting was leased before; pending is accepted and not trained; reclaimed was trained by another
    branch, and its samples are gone."""
    attempt: int
    worker: str | None
    position: int | None
    versions: tuple[int, int] | None
    """Oldest and newest policy version of an accepted group's tokens."""
    rewards: list[float | None]
    """Of an accepted group's samples."""
    reason: str | None
    requeued_from: int | None
    prompt: PromptPlace | None
    """None where it can't be read any more."""


class TaskList(msgspec.Struct, frozen=True):
    """`vime queue tasks`."""

    tasks: list[TaskRow]
    num_matching: int
    """Also those beyond the limit."""
    num_closed_segments_left_out: int


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One group that is leased."""

    group_index: int
    segment: int
    attempt: int
    worker: str
    age_s: float | None
    """Since it was leased; None when the coordinator has not noted it (yet)."""
    heartbeat_age_s: float | None
    """Since it was last extended."""
    prompt: PromptPlace | None


class LeaseList(msgspec.Struct, frozen=True):
    """`vime queue leases`."""

    leases: list[LeaseRow]
    coordinator_alive: bool | None
    """False: it has ended, so the leases are stale. None: it is on another host, or there never was one."""


def list_tasks(
    location: RunLocation, *, states: Collection[str], groups: Collection[int], closed: bool, limit: int
) -> TaskList:
    """Groups by index, of open segments or with `closed` of all; empty `states` and `groups` stand for any."""
    view = QueueView(location.pool)
    line = BranchLine(location.root, view.control_dir)
    segments = view.all_segments() if closed or groups else view.opened
    matching = [
        group
        for segment in segments
        for group in segment.groups()
        if (not groups or group.group_index in groups) and (not states or state_words(group, line) in states)
    ]
    shown = matching[:limit]
    return TaskList(list(_rows(location, shown, line)), len(matching), len(view.entries) - len(segments))


def list_leases(location: RunLocation) -> LeaseList:
    """Groups that are leased now, by index."""
    view = QueueView(location.pool)
    leased = [group for segment in view.opened for group in segment.groups() if group.state == "leased"]
    places, times, now = _places(location, leased), read_lease_times(view.control_dir), time.time()
    rows = [
        LeaseRow(
            group_index=group.group_index,
            segment=group.segment,
            attempt=group.attempt,
            worker=group.worker or "",
            age_s=now - noted.leased_at if (noted := times.get(group.attempt_id or "")) else None,
            heartbeat_age_s=now - noted.extended_at if noted else None,
            prompt=places.get(group.group_index),
        )
        for group in leased
    ]
    coordinator = read_coordinator(view.control_dir)
    return LeaseList(rows, None if coordinator is None else coordinator.alive)


def _rows(location: RunLocation, groups: list[GroupView], line: BranchLine) -> Iterator[TaskRow]:
    known, _ = summaries(location, groups)
    places = _places(location, groups)
    for group in groups:
        summary = known.get(group.group_index)
        seen = [] if summary is None else [v for v in (*summary.min_versions, *summary.max_versions) if v is not None]
        yield TaskRow(
            group_index=group.group_index,
            segment=group.segment,
            state=state_words(group, line),
            attempt=group.attempt,
            worker=group.worker,
            position=group.position,
            versions=(min(seen), max(seen)) if seen else None,
            rewards=[] if summary is None else summary.rewards,
            reason=group.reason,
            requeued_from=group.requeued_from,
            prompt=places.get(group.group_index),
        )


def _places(location: RunLocation, groups: list[GroupView]) -> dict[int, PromptPlace]:
    with Pool.open(location.pool) as pool:
        return prompt_places(location, read_prompts(pool, groups).values())
