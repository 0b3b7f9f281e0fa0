"""Prompts into the queue: groups and the cursor behind them in one journal transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256

import msgspec
import straw

from storage.coordinator import CoordinatorSession
from storage.facts import PROMPT_PRODUCER, GroupPhase, GroupState, TaskNotes, task_of
from storage.prompt_codec import encode_prompt
from storage.queue_types import Stage
from storage.segment_list import SegmentList
from vime.data.cursor import PromptCursor, PromptTask
from vime.errors import StorageError

MAX_ATTEMPTS = 10**9
"""straw spends an attempt on every restart and expiry; failures of a group are counted by its producers."""
_TASK = asdict(straw.TaskSpec("", max_attempts=MAX_ATTEMPTS))
"""straw's form of a task, but for what differs from group to group."""


def submit(session: CoordinatorSession, prompts: Sequence[PromptTask], cursor: PromptCursor) -> None:
    """See `GroupQueue.submit_prompts`."""
    indices = [task.group_index for task in prompts]
    if not indices or indices != list(range(indices[0], cursor.next_group_index)):
        raise StorageError(f"Prompts must be groups in order up to {cursor.next_group_index - 1}, found {indices}.")
    payloads = [encode_prompt(task) for task in prompts]
    digests = [sha256(payload).hexdigest() for payload in payloads]
    with session.changing(f"submit groups {indices[0]}..{indices[-1]}") as segments:
        committed = segments.newest.cursor()
        if indices[0] < committed.next_group_index:
            _check_repeat(segments, indices, digests, cursor, committed)
            return
        if indices[0] != committed.next_group_index:
            raise StorageError(
                f"Prompts start at group {indices[0]}, the queue continues at {committed.next_group_index}.",
                next_step="Take prompts from the queue's own cursor.",
            )
        content = sha256("".join(digests).encode()).hexdigest()
        refs = session.pool.publish_prompts(payloads, submission_id=f"prompts:{indices[0]}:{content}")
        tasks = [
            _TASK
            | {
                "task_id": task_of(index),
                "metadata": msgspec.to_builtins(TaskNotes(digest, prompt=ref)),
                "scheduling_key": index,
            }
            for index, ref, digest in zip(indices, refs, digests, strict=True)
        ]
        state = msgspec.to_builtins(cursor)
        segments.newest.coordinator.submit_tasks(
            f"prompts:{indices[0]}", tasks, producer_id=PROMPT_PRODUCER, producer_state=state
        )
        segments.newest.waiting |= {
            index: GroupState(index, GroupPhase.FRESH, Stage.FRESH, ref, TaskNotes(digest, prompt=ref))
            for index, ref, digest in zip(indices, refs, digests, strict=True)
        }


def _check_repeat(
    segments: SegmentList,
    indices: list[int],
    digests: list[str],
    cursor: PromptCursor,
    committed: PromptCursor,
) -> None:
    for index, digest in zip(indices, digests, strict=True):
        state = segments.with_group(index).group(index)
        if state is None or state.notes.digest != digest:
            found = "is missing" if state is None else "has another prompt"
            raise StorageError(
                f"Groups {indices[0]}..{indices[-1]} were submitted before, and group {index} {found}.",
                next_step="Check that the prompt file and its settings have not changed.",
            )
    if cursor.next_group_index == committed.next_group_index and cursor != committed:
        raise StorageError(f"Groups up to {indices[-1]} were submitted with cursor {committed}, found {cursor}.")
