"""`vime queue requeue` and `vime queue drop`: changes to the queue of a run that is not running."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pipeline.run_folder import RunFolder
from pipeline.session_lock import refuse_running, session_lock
from recovery.claim import refuse_unbound
from recovery.run_location import RunLocation
from storage.dead_letters import DeadLetterBox
from storage.lock import refuse_held
from storage.pool import Pool
from storage.queue_edit import QueueEditor
from storage.queue_view import GroupView, QueueView
from vime.errors import CoordinatorBusyError, NoRunError, RestoreError, SampleError, SessionRunningError

OWNER = "vime queue"


class GroupsDroppedByHand(SampleError):
    """Why the letter of such a group was written."""

    default_reason = "by_hand"


def refuse_live(location: RunLocation) -> None:
    """Raise `RestoreError` while the run is live, before groups are looked at; nothing is written."""
    with _told_as_live():
        refuse_running(RunFolder(location.root, location.pool))
        refuse_held(location.pool / "vime")


def groups_to_requeue(view: QueueView, indices: Sequence[int]) -> list[GroupView]:
    """The dropped groups with these indices; all that were not requeued before, when there are none.

    Raises `NoRunError` for a group that is not dropped, or was requeued before.
    """
    groups = {group.group_index: group for segment in view.all_segments() for group in segment.groups()}
    successors = {group.requeued_from: group.group_index for group in groups.values()}
    if not indices:
        return [g for g in groups.values() if g.state == "dropped" and g.group_index not in successors]
    for index in indices:
        if index not in groups or groups[index].state != "dropped":
            found = "not submitted" if index not in groups else groups[index].state
            raise NoRunError(
                f"Group {index} is {found}; only dropped groups can be requeued.",
                next_step="`vime queue dead RUN` lists them.",
            )
        if index in successors:
            raise NoRunError(
                f"Group {index} was requeued before, as group {successors[index]}.",
                next_step=f"Leave it out; if group {successors[index]} is dropped too, name that.",
            )
    return [groups[index] for index in indices]


def groups_to_drop(view: QueueView, indices: Sequence[int]) -> list[GroupView]:
    """The groups with these indices, which must wait to be generated. Raises `NoRunError` for another."""
    groups = []
    for index in indices:
        segment = view.with_group(index)
        group = None if segment is None else segment.group(index)
        if group is None or group.state not in ("fresh", "waiting", "leased"):
            found = "not submitted" if group is None else group.state
            raise NoRunError(
                f"Group {index} is {found}; only groups that wait to be generated can be dropped. What is accepted "
                "will be trained.",
                next_step="`vime queue tasks RUN --state waiting` (or fresh) lists them.",
            )
        groups.append(group)
    return groups


def requeue(location: RunLocation, groups: Sequence[GroupView]) -> list[int]:
    """Submit their prompts again; the new groups. Raises `RestoreError` while the run is live."""
    with _stopped(location) as editor:
        return editor.requeue(groups) if groups else []


def drop(location: RunLocation, groups: Sequence[GroupView], reason: str) -> None:
    """Drop groups with a letter each. Raises `RestoreError` while the run is live."""
    with _stopped(location) as editor:
        box = DeadLetterBox(location.dead_letters, "vime-queue")
        for group in groups:
            box.put(
                GroupsDroppedByHand(f"group {group.group_index} was dropped by hand", reason=reason),
                reason=reason,
                group_index=group.group_index,
                attempt=group.attempt,
                samples=[],
                prompt_ref=group.prompt_ref,
                payload_ref=None,
            )
            editor.drop(group.group_index, reason)


@contextmanager
def _stopped(location: RunLocation) -> Iterator[QueueEditor]:
    """The run held against being started, with its queue opened for changes. Raises `RestoreError`."""
    refuse_unbound(location.root, location.pool)
    with (
        _told_as_live(),
        session_lock(RunFolder(location.root, location.pool)),
        Pool.open(location.pool) as pool,
        QueueEditor(pool, owner=OWNER) as editor,
    ):
        yield editor


@contextmanager
def _told_as_live() -> Iterator[None]:
    """Turns locks that another process holds into a `RestoreError` that says what to do."""
    try:
        yield
    except (CoordinatorBusyError, SessionRunningError) as error:
        raise RestoreError(
            f"The run is live, and its queue can't be changed: {error.message}",
            next_step="Stop it with one Ctrl-C (or SIGTERM): it finishes its step and commits. Change the queue, then "
            "start the run again with the same command.",
        ) from error
