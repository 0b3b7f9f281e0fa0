"""The one open coordinator of a pool: the lock around its segments, and guarded access to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import straw

from storage.lock import CoordinatorLock
from storage.pool import Pool
from storage.refs import GroupRef, to_straw_ref
from storage.segment_list import SegmentList
from storage.straw_errors import translated
from vime.errors import StorageError


class CoordinatorSession:
    """The queue's segments under the coordinator lock; every access goes through `reading` or `changing`."""

    def __init__(self, pool: Pool, *, owner: str, lease_seconds: float, clock: Callable[[], float]) -> None:
        self.pool = pool
        self._mutex = threading.RLock()
        self._closed = False
        with ExitStack() as stack:
            self.lock = stack.enter_context(CoordinatorLock.acquire(pool.control_dir, owner=owner))
            self._segments = SegmentList(
                pool, owner=f"{owner}#{self.lock.epoch}", clock=lambda: clock() / lease_seconds
            )
            stack.callback(self._segments.close)
            self._exit = stack.pop_all()

    @contextmanager
    def reading(self, what: str) -> Iterator[SegmentList]:
        """The segments, for calls that change nothing; `what` names the action in errors."""
        with self._mutex:
            if self._closed:
                raise StorageError(f"{what}: the queue of {self.pool.root} is closed.", next_step="Open it again.")
            with translated(what, self.pool.root):
                yield self._segments

    @contextmanager
    def changing(self, what: str) -> Iterator[SegmentList]:
        """The segments, for calls that change or promise something: first checks that no other has taken over."""
        with self.reading(what) as segments:
            self.lock.check()
            yield segments

    def check_published_for(self, refs: Mapping[tuple[str, str], GroupRef]) -> None:
        """Raise `StorageError` unless groups are in the pool and were published for these (task id, attempt id).

        One look at the index of a publication serves all its groups; straw's own check, which reads it anew for each,
        is asked where that look doesn't settle it.
        """
        indexes: dict[straw.SegmentRef, list[dict[str, Any]]] = {}
        for (task_id, attempt_id), ref in refs.items():
            stored = to_straw_ref(ref)
            segment = stored.manifest.segment
            with translated(f"{task_id}: the result of attempt {attempt_id}", self.pool.root):
                if segment not in indexes:
                    indexes[segment] = self.pool.store.inspect_segment(segment)["records"]
                if not _is_stamped(indexes[segment], ref, task_id, attempt_id):
                    self.pool.store.validate(stored, task_id=task_id, attempt_id=attempt_id)

    def close(self) -> None:
        """Close the segments, then free the lock."""
        with self._mutex:
            self._closed = True
            self._exit.close()


def _is_stamped(records: list[dict[str, Any]], ref: GroupRef, task_id: str, attempt_id: str) -> bool:
    """Whether the last member before the manifest that `ref` names carries the stamp of the attempt."""
    if not 0 < ref.ordinal < len(records):
        return False
    manifest, member = records[ref.ordinal]["envelope"], records[ref.ordinal - 1]["envelope"]
    stamp = {"task_id": task_id, "attempt_id": attempt_id}
    return ref.digest in manifest["record_id"] and member["metadata"] == stamp
