"""Changes by hand to the queue of a stopped run, under the coordinator lock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import sha256
from types import TracebackType

import msgspec
import straw

from storage.coordinator import CoordinatorSession
from storage.facts import PROMPT_PRODUCER, TaskNotes, task_of
from storage.pool import Pool
from storage.prompt_codec import decode_prompt, encode_prompt
from storage.queue_view import GroupView
from storage.submission import MAX_ATTEMPTS
from vime.data.cursor import PromptCursor
from vime.errors import StorageError

LEASE_SECONDS = 60.0
"""Of the leases that a change takes; they end with it."""


class QueueEditor:
    """Holds the coordinator lock from its making to `close`. Raises `CoordinatorBusyError` when another holds it."""

    def __init__(self, pool: Pool, *, owner: str) -> None:
        self._pool, self._owner = pool, owner
        self._session = CoordinatorSession(pool, owner=owner, lease_seconds=LEASE_SECONDS, clock=time.monotonic)

    def drop(self, group_index: int, reason: str) -> None:
        """End a group that waits, for good. Raises `StorageError` for one that is accepted or dropped."""
        task_id = task_of(group_index)
        with self._session.changing(f"drop group {group_index}") as segments:
            coordinator = segments.with_group(group_index).coordinator
            assignments = coordinator.acquire(self._owner, 1, task_ids=[task_id]).assignments
            if not assignments:
                status = coordinator.task_status(task_id)
                found = "not submitted" if status is None else status["state"]
                raise StorageError(f"Group {group_index} does not wait to be generated: it is {found}.")
            lease = assignments[0].lease
            coordinator.fail_task(
                lease,
                request_id=f"drop:{lease.attempt_id}",
                failure={"category": "dropped", "reason": reason},
                retryable=False,
            )

    def requeue(self, groups: Sequence[GroupView]) -> list[int]:
        """Submit the prompts of dropped groups again, as new groups at the end of the queue; their indices.

        The dropped ones stay dropped: no fact of the queue is taken back. All in one transaction.
        """
        with self._session.changing(f"requeue {len(groups)} groups") as segments:
            before = segments.newest.cursor()
            first = before.next_group_index
            size = before.next_sample_index // first
            payloads = [
                encode_prompt(
                    msgspec.structs.replace(
                        decode_prompt(self._pool.read_blob(group.prompt_ref)),
                        group_index=first + number,
                        first_sample_index=before.next_sample_index + number * size,
                    )
                )
                for number, group in enumerate(groups)
            ]
            content = sha256(b"".join(payloads)).hexdigest()
            refs = self._pool.publish_prompts(payloads, submission_id=f"prompts:{first}:{content}")
            tasks = [
                straw.TaskSpec(
                    task_of(first + number),
                    metadata=msgspec.to_builtins(
                        TaskNotes(sha256(payload).hexdigest(), prompt=ref, requeued_from=group.group_index)
                    ),
                    max_attempts=MAX_ATTEMPTS,
                    scheduling_key=first + number,
                )
                for number, (group, payload, ref) in enumerate(zip(groups, payloads, refs, strict=True))
            ]
            after = PromptCursor(
                before.epoch, before.offset, first + len(groups), before.next_sample_index + len(groups) * size
            )
            segments.newest.coordinator.submit_tasks(
                f"prompts:{first}", tasks, producer_id=PROMPT_PRODUCER, producer_state=msgspec.to_builtins(after)
            )
        return list(range(first, first + len(groups)))

    def close(self) -> None:
        """Free the lock."""
        self._session.close()

    def __enter__(self) -> QueueEditor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
