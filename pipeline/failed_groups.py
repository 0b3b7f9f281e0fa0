"""Failing samples of a producer: set aside as dead letters, and counted by reason."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.messages import Work
from storage.columns import EncodedGroup, encode_group
from storage.dead_letters import DeadLetterBox
from storage.refs import GroupRef, lease_from_bytes
from vime.errors import EngineError, FailedSampleError
from vime.utils.types import Sample

UNEXPECTED = "unexpected_error"
"""Reason of what neither vime nor a hook raised on purpose; the letter's trace says where."""


@dataclass(frozen=True)
class Failure:
    """An error, and the samples that it is about: one, or all of a group where it is of no single one."""

    samples: Sequence[Sample]
    error: Exception

    @property
    def reason(self) -> str:
        """The word that it is counted under."""
        if isinstance(self.error, FailedSampleError):
            return self.error.reason
        return "engine" if isinstance(self.error, EngineError) else UNEXPECTED


def most_telling(failures: Sequence[Failure]) -> Failure:
    """The failure that a group is dropped for: an engine's comes last, since it says nothing of the sample."""
    return next((failure for failure in failures if not isinstance(failure.error, EngineError)), failures[0])


logger = logging.getLogger(__name__)


class PayloadStore(Protocol):
    """What is needed of a pool."""

    def publish_groups(self, items: Sequence[tuple[EncodedGroup, bytes]], *, submission_id: str) -> list[GroupRef]: ...


class FailedGroups:
    """Writes the letters of one producer."""

    def __init__(self, box: DeadLetterBox, payloads: PayloadStore | None, max_attempts: int) -> None:
        """Without `payloads` (a pool that keeps only what is trained) the letters hold the samples themselves."""
        self._box, self._payloads, self._max_attempts = box, payloads, max_attempts
        self._attempts: Counter[int] = Counter()
        self.num_samples_by_reason: Counter[str] = Counter()
        """Failed samples of every attempt, also of those that were tried again."""

    async def attempt_failed(self, work: Work, failures: Sequence[Failure]) -> bool:
        """Write letters of the samples that failed; whether the group has failed too often to be tried again.

        An engine's failure says nothing of a sample: it gets a letter only when its group is dropped. Raises
        `StorageError`.
        """
        group_index, cause = work.group_index, most_telling(failures)
        self._attempts[group_index] += 1
        attempts = self._attempts[group_index]
        logger.warning("group %d failed, attempt %d (%s): %s", group_index, attempts, cause.reason, cause.error)
        is_last = attempts >= self._max_attempts
        await self.record(work, [each for each in failures if is_last or not isinstance(each.error, EngineError)])
        if is_last:
            self.finished(group_index)
        return is_last

    def finished(self, group_index: int) -> None:
        """A group needs no further attempt."""
        self._attempts.pop(group_index, None)

    async def record(self, work: Work, failures: Sequence[Failure]) -> None:
        """Make a letter of each failure durable, and count. Raises `StorageError`."""
        for failure in failures:
            await asyncio.to_thread(self._record, work, failure)
            self.num_samples_by_reason[failure.reason] += len(failure.samples)

    def _record(self, work: Work, failure: Failure) -> None:
        lease = lease_from_bytes(work.lease)
        self._box.put(
            failure.error,
            reason=failure.reason,
            group_index=work.group_index,
            attempt=lease.generation,
            samples=failure.samples,
            prompt_ref=work.prompt_ref,
            payload_ref=self._publish(work, failure),
        )

    def _publish(self, work: Work, failure: Failure) -> GroupRef | None:
        """The failed samples in the pool; None without one, or where they can't be encoded as they are."""
        if self._payloads is None:
            return None
        try:
            group = encode_group(failure.samples)
        except Exception:  # the boundary to what user code left in the samples: the letter then holds them as JSON
            return None
        return self._payloads.publish_groups([(group, work.lease)], submission_id=f"dead:{uuid.uuid4().hex}")[0]
