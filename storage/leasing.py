"""Leases of groups over all segments: who gets which group next, and how a lease ends without a result."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from hashlib import sha256

import msgspec

from storage.facts import GroupPhase, GroupState, group_of, task_of
from storage.queue_types import GroupReturn, LeasedGroup, LeaseState, Stage
from storage.refs import Lease, lease_fields, lease_from_bytes, lease_to_bytes, ref_fields
from storage.segment import HeldLease, Segment
from storage.segment_list import SegmentList
from vime.errors import StorageError

NO_VERSION = 2**63 - 1
"""Scheduling key of a returned group without a policy version: it comes last in its stage."""
ENOUGH_LEFT = 0.25
"""Part of a lease's time that using it surely takes less than."""
_LEASE_STATES = {"extended": LeaseState.EXTENDED, "LeaseExpired": LeaseState.EXPIRED, "StaleAttempt": LeaseState.STALE}


def lease_order(state: GroupState) -> tuple[int, int, int]:
    """Completed deliveries, then partial groups, then prompts; oldest policy version first, then first in first out.

    A prompt's place is its index, also when it was leased before.
    """
    if state.stage is Stage.FRESH:
        return 0, 0, state.group_index
    return -state.stage, NO_VERSION if state.notes.version is None else state.notes.version, state.notes.order


def lease(segments: SegmentList, worker_id: str, max_groups: int) -> list[LeasedGroup]:
    """See `GroupQueue.lease`."""
    sweep(segments)
    waiting = ((state, segment) for segment in segments.opened() for state in segment.waiting.values())
    chosen = heapq.nsmallest(max_groups, waiting, key=lambda item: lease_order(item[0]))
    leases: dict[int, HeldLease] = {}
    for segment in {segment.entry.index: segment for _, segment in chosen}.values():
        wanted = [state for state, its_segment in chosen if its_segment is segment]
        for held in _acquire(segments, segment, worker_id, wanted):
            leases[held.state.group_index] = held
    return [_leased(leases[state.group_index]) for state, _ in chosen]


def heartbeat(segments: SegmentList, leases: Sequence[bytes]) -> list[LeaseState]:
    """See `GroupQueue.heartbeat`."""
    states = [LeaseState.STALE] * len(leases)  # what closed segments say: no group of theirs is in flight
    for index, members in by_segment(segments, leases).items():
        if segments.is_open(index):
            answers = extend(segments, segments.at(index), [item for _, item in members])
            for (number, _), answer in zip(members, answers, strict=True):
                states[number] = answer
    if LeaseState.EXPIRED in states:
        sweep(segments)
    return states


def extend(segments: SegmentList, segment: Segment, leases: Sequence[Lease]) -> list[LeaseState]:
    """Extend leases of one segment; one state each. Nothing is written."""
    answers = segment.coordinator.heartbeat([lease_fields(item) for item in leases])
    states = [_LEASE_STATES[answer] for answer in answers]
    for item, state in zip(leases, states, strict=True):
        if state is LeaseState.EXTENDED and item.attempt_id in segment.held:
            segment.held[item.attempt_id].deadline = segments.clock() + 1
    return states


def take_over(segments: SegmentList, worker_id: str, leases: Sequence[bytes]) -> list[bytes | None]:
    """See `GroupQueue.take_over`."""
    taken: list[bytes | None] = [None] * len(leases)
    for index, members in by_segment(segments, leases).items():
        if not segments.is_open(index):
            continue
        segment = segments.at(index)
        for number, item in members:
            if item.attempt_id in segment.held:
                taken[number] = leases[number]
        left = {number: item for number, item in members if _was_interrupted(segment, item)}
        states = [segment.waiting[group_of(item.task_id)] for item in left.values()]
        for number, held in zip(left, _acquire(segments, segment, worker_id, states), strict=True):
            taken[number] = lease_to_bytes(held.lease)
    return taken


def _was_interrupted(segment: Segment, lease: Lease) -> bool:
    """Whether nobody has leased the group since, nor given it back."""
    state = segment.waiting.get(group_of(lease.task_id))
    task = segment.coordinator.task_status(lease.task_id)
    is_last = state is not None and task is not None and task["generation"] == lease.generation
    return is_last and state is not None and state.notes.attempt != lease.attempt_id


def sweep(segments: SegmentList) -> list[bytes]:
    """See `GroupQueue.sweep`."""
    now = segments.clock()
    ended: list[bytes] = []
    for segment in segments.opened():
        due = [attempt for attempt, held in segment.held.items() if held.deadline <= now]
        if not due:
            continue
        segment.end_expired_leases()
        for attempt in due:
            state = segment.group(segment.held[attempt].state.group_index)
            if state is None or state.attempt == attempt:
                continue  # straw's deadline is a little later than ours
            held = segment.held.pop(attempt)
            if held.state.stage is not Stage.FRESH:
                # A reader that goes on all the same can't have its result accepted, so nothing needs its input.
                segment.coordinator.release_task_reads([held.lease])
            segment.waiting[state.group_index] = state
            ended.append(lease_to_bytes(held.lease))
    return ended


def release(segments: SegmentList, leases: Sequence[bytes]) -> list[bool]:
    """See `GroupQueue.release`."""
    released = [False] * len(leases)
    for index, members in by_segment(segments, leases).items():
        if segments.is_reclaimed(index):
            continue
        segment = segments.at(index)
        request = digest_of([item.attempt_id for _, item in members])
        answers = segment.coordinator.release_tasks(
            [lease_fields(item) for _, item in members], request_id=f"release:{request}"
        )
        for (number, item), answer in zip(members, answers, strict=True):
            released[number] = answer == "released"
            held = segment.held.pop(item.attempt_id, None) if released[number] else None
            if held is not None:
                segment.waiting[held.state.group_index] = msgspec.structs.replace(
                    held.state, phase=GroupPhase.WAITING, attempt=""
                )
    return released


def yield_groups(segments: SegmentList, returns: Sequence[GroupReturn]) -> list[bool]:
    """See `GroupQueue.yield_groups`."""
    for item in returns:
        if item.stage is Stage.FRESH:
            raise StorageError("A group goes back with samples as partial or completed, found fresh.")
    done = [False] * len(returns)
    for index, members in by_segment(segments, [item.lease for item in returns]).items():
        if segments.is_reclaimed(index):
            continue
        segment = segments.at(index)
        alive = alive_leases(segments, segment, [held for _, held in members])
        updates, states = [], {}
        for number, held in members:
            if held.attempt_id in alive:
                state = states[number] = _returned(segments, segment.held[held.attempt_id], returns[number])
                updates.append(_update(held, state))
            else:
                present = segment.group(group_of(held.task_id))
                done[number] = present is not None and present.notes.attempt == held.attempt_id
        if updates:
            request = digest_of([state.notes.attempt for state in states.values()])
            segment.coordinator.yield_tasks(updates, request_id=f"yield:{request}")
        for number, state in states.items():
            del segment.held[state.notes.attempt]
            segment.waiting[state.group_index] = state
            done[number] = True
    return done


def alive_leases(segments: SegmentList, segment: Segment, leases: Sequence[Lease]) -> set[str]:
    """Attempt ids of those leases that still hold, and will while they are used.

    straw ends a lease at its deadline and not before, so only those are asked for, and extended, that come near it.
    """
    held = [item for item in leases if item.attempt_id in segment.held]
    near = segments.clock() + ENOUGH_LEFT
    alive = {item.attempt_id for item in held if segment.held[item.attempt_id].deadline > near}
    asked = [item for item in held if item.attempt_id not in alive]
    answers = extend(segments, segment, asked) if asked else []
    return alive | {item.attempt_id for item, state in zip(asked, answers, strict=True) if state is LeaseState.EXTENDED}


def by_segment(segments: SegmentList, leases: Sequence[bytes]) -> dict[int, list[tuple[int, Lease]]]:
    """Segment index -> (number in `leases`, lease), each lease once."""
    members: dict[int, list[tuple[int, Lease]]] = defaultdict(list)
    for number, content in enumerate(leases):
        item = lease_from_bytes(content)
        members[segments.index_of(item)].append((number, item))
    return members


def digest_of(parts: Sequence[str]) -> str:
    """A name for a call about these parts: the same for the same ones."""
    return sha256("\n".join(parts).encode()).hexdigest()


def _acquire(
    segments: SegmentList, segment: Segment, worker_id: str, wanted: Sequence[GroupState]
) -> Iterator[HeldLease]:
    task_ids = [task_of(state.group_index) for state in wanted]
    assignments = segment.coordinator.acquire(worker_id, len(task_ids), task_ids=task_ids).assignments
    leases = {item.task.task_id: item.lease for item in assignments}
    if leases.keys() != set(task_ids):
        raise StorageError(
            f"segment {segment.entry.index}: asked for {task_ids}, straw leased {sorted(leases)}.",
            next_step="Close and reopen the queue, so that its books are read anew.",
        )
    for state in wanted:
        given = leases[task_of(state.group_index)]
        held = HeldLease(state, given, segments.clock() + 1, segments.next_serial())
        segment.held[given.attempt_id] = held
        del segment.waiting[state.group_index]
        yield held


def _leased(held: HeldLease) -> LeasedGroup:
    state = held.state
    return LeasedGroup(
        lease_to_bytes(held.lease),
        state.group_index,
        state.ref,
        held.lease.generation,
        state.stage,
        state.notes.version,
    )


def _returned(segments: SegmentList, held: HeldLease, item: GroupReturn) -> GroupState:
    """The group of a lease as it will wait."""
    notes = msgspec.structs.replace(
        held.state.notes,
        version=item.min_version,
        order=segments.next_order(),
        attempt=held.lease.attempt_id,
    )
    return GroupState(held.state.group_index, GroupPhase.WAITING, item.stage, item.ref, notes)


def _update(item: Lease, state: GroupState) -> dict[str, object]:
    """straw's words for `_returned`."""
    return {
        "lease": lease_fields(item),
        "input_ref": ref_fields(state.ref),
        "priority": int(state.stage),
        "scheduling_key": NO_VERSION if state.notes.version is None else state.notes.version,
        "metadata": msgspec.to_builtins(state.notes),
    }
