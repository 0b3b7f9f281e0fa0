"""The one open coordinator of a pool: the lock around its segments, and guarded access to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

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
            self._reader = stack.enter_context(pool.store.read_session())
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

    def check_published_for(self, ref: GroupRef, *, task_id: str, attempt_id: str) -> None:
        """Raise `StorageError` unless a group is in the pool and was published for this attempt.

        The session keeps the index of a publication, so that its other groups are checked without reading it again.
        """
        with translated(f"{task_id}: the result of attempt {attempt_id}", self.pool.root):
            self._reader.validate(to_straw_ref(ref), task_id=task_id, attempt_id=attempt_id)

    def close(self) -> None:
        """Close the segments, then free the lock."""
        with self._mutex:
            self._closed = True
            self._exit.close()
