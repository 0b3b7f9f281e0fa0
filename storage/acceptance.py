"""Acceptance of results: all that arrive together share one journal transaction a segment."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from storage.columns import summary_from_header
from storage.coordinator import CoordinatorSession
from storage.facts import ACCEPTED_PRIORITY, GroupPhase, group_of
from storage.leasing import alive_leases, by_segment, digest_of
from storage.pool import Pool
from storage.positions import PositionRanges
from storage.queue_types import AcceptedGroup, GroupResult, Receipt
from storage.refs import Lease, lease_fields, ref_fields
from storage.segment import Segment, packs_of
from storage.segment_list import SegmentList
from vime.errors import StorageError


def accept(session: CoordinatorSession, segments: SegmentList, results: Sequence[GroupResult]) -> list[Receipt | None]:
    """See `GroupQueue.accept_many`."""
    receipts: list[Receipt | None] = [None] * len(results)
    for index, members in by_segment(segments, [result.lease for result in results]).items():
        for number, lease in members:
            _check_group(lease, results[number])
        if segments.is_reclaimed(index):
            continue
        segment = segments.at(index)
        alive = alive_leases(segments, segment, [lease for _, lease in members])
        new = {lease.attempt_id: (lease, results[number]) for number, lease in members if lease.attempt_id in alive}
        session.check_published_for(
            {
                (lease.task_id, attempt): result.ref
                for attempt, (lease, result) in new.items()
                if result.ref != segment.held[attempt].state.ref  # a completed delivery is accepted as it is
            }
        )
        accepted = _accept_new(segment, list(new.values()))
        for number, lease in members:
            is_new = lease.attempt_id in accepted and results[number] is new[lease.attempt_id][1]
            known = accepted[lease.attempt_id] if is_new else _known_receipt(segment, lease, results[number])
            receipts[number] = known
    return receipts


def accepted_groups(pool: Pool, segments: SegmentList, except_for: PositionRanges) -> list[AcceptedGroup]:
    """See `GroupQueue.accepted`."""
    groups = []
    for segment in segments.opened():
        for state in segment.groups():
            if state.phase is not GroupPhase.ACCEPTED or state.notes.position is None:
                continue
            position = segment.first_position + state.notes.position
            if position not in except_for:
                summary = summary_from_header(pool.read_header(state.ref))
                groups.append(AcceptedGroup(position, state.group_index, state.ref, summary))
    return sorted(groups, key=lambda group: group.position)


def _accept_new(segment: Segment, results: Sequence[tuple[Lease, GroupResult]]) -> dict[str, Receipt]:
    """Accept results of leases that hold, in one transaction; attempt id -> receipt."""
    if not results:
        return {}
    updates = []
    packs = []
    for local, (lease, result) in enumerate(results, start=segment.num_accepted):
        before = segment.held[lease.attempt_id].state
        notes = msgspec.structs.replace(before.notes, version=None, order=0, attempt=lease.attempt_id, position=local)
        packs.append(packs_of(msgspec.structs.replace(before, ref=result.ref)))
        updates.append(
            {
                "lease": lease_fields(lease),
                "input_ref": ref_fields(result.ref),
                "priority": ACCEPTED_PRIORITY,
                "scheduling_key": local,
                "metadata": msgspec.to_builtins(notes),
            }
        )
    request = digest_of([lease.attempt_id for lease, _ in results])
    segment.coordinator.yield_tasks(updates, request_id=f"accept:{request}")
    receipts = {}
    for position, (lease, _) in enumerate(results, segment.first_position + segment.num_accepted):
        receipts[lease.attempt_id] = Receipt(position, group_of(lease.task_id))
        del segment.held[lease.attempt_id]
    segment.packs_of_accepted += packs
    return receipts


def _known_receipt(segment: Segment, lease: Lease, result: GroupResult) -> Receipt | None:
    """The receipt of an attempt that was accepted before, None for one that was not.

    Raises `StorageError` when it was accepted with another result.
    """
    group_index = group_of(lease.task_id)
    state = segment.group(group_index)
    if state is None or state.notes.position is None or state.notes.attempt != lease.attempt_id:
        return None
    if state.ref.digest != result.ref.digest:
        raise StorageError(
            f"accept group {group_index}, attempt {lease.generation}: it was accepted with the result of digest "
            f"{state.ref.digest[:12]}, found {result.ref.digest[:12]}.",
            next_step="Retry with the same result.",
        )
    return Receipt(segment.first_position + state.notes.position, group_index)


def _check_group(lease: Lease, result: GroupResult) -> None:
    expected, found = group_of(lease.task_id), result.summary.group_index
    if found != expected:
        raise StorageError(f"The result of group {found} came with a lease of group {expected}.")
