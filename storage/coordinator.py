"""The one open coordinator of a pool: creation and recovery, the lock around it, and guarded access."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import straw

from storage.files import write_atomically
from storage.lock import CoordinatorLock
from storage.pool import Pool
from storage.straw_errors import translated
from vime.errors import CorruptDataError, StorageError

_PAGE = 1000
"""Most commits that straw returns in one call."""


class QueueFile(msgspec.Struct, frozen=True):
    """`vime/queue.json`: the straw queue that is in use."""

    schema_version: int
    queue_id: str


class CoordinatorSession:
    """straw's coordinator under the coordinator lock; every access goes through `reading` or `changing`."""

    def __init__(self, pool: Pool, *, owner: str, lease_seconds: float, clock: Callable[[], float]) -> None:
        self.pool = pool
        self._mutex = threading.RLock()
        self._closed = False
        with ExitStack() as stack:
            self.lock = stack.enter_context(CoordinatorLock.acquire(pool.control_dir, owner=owner))
            self.owner = f"{owner}#{self.lock.epoch}"
            self._coordinator = _open_coordinator(pool, self.owner, lambda: clock() / lease_seconds)
            stack.callback(self._coordinator.close)
            self._exit = stack.pop_all()

    @contextmanager
    def reading(self, what: str) -> Iterator[straw.Coordinator]:
        """The coordinator, for calls that change nothing; `what` names the action in errors."""
        with self._mutex:
            if self._closed:
                raise StorageError(f"{what}: the queue of {self.pool.root} is closed.", next_step="Open it again.")
            with translated(what, self.pool.root):
                yield self._coordinator

    @contextmanager
    def changing(self, what: str) -> Iterator[straw.Coordinator]:
        """The coordinator, for calls that change or promise something: first checks that no other has taken over."""
        with self.reading(what) as coordinator:
            self.lock.check()
            yield coordinator

    def commits(self, position: int = 0) -> list[straw.CommitReceipt]:
        """Receipts of accepted groups from `position` on."""
        receipts: list[straw.CommitReceipt] = []
        with self.reading("read accepted groups") as coordinator:
            while page := coordinator.read_commits(position, _PAGE).commits:
                receipts += page
                position += len(page)
        return receipts

    def close(self) -> None:
        """Close the coordinator, then free the lock."""
        with self._mutex:
            self._closed = True
            self._exit.close()


def _open_coordinator(pool: Pool, owner: str, clock: Callable[[], float]) -> straw.Coordinator:
    """Recover the pool's queue, or create it.

    A straw queue whose creation was cut off can be neither created nor recovered, so each creation uses a new name
    and `queue.json` names it only once it exists. straw binds a queue to its lease time; here `clock` counts in
    leases, so that the setting may change between runs.
    """
    path = pool.control_dir / "queue.json"
    recover = path.exists()
    queue_id = _read_queue_id(pool) if recover else f"groups-{uuid.uuid4().hex}"
    with translated(f"open queue {queue_id}", pool.root):
        coordinator = straw.Coordinator(
            pool.store,
            queue_id=queue_id,
            namespace=True,
            exclusive_owner=owner,
            recover=recover,
            lease_seconds=1,
            clock=clock,
        )
    if not recover:
        write_atomically(path, msgspec.json.encode(QueueFile(1, queue_id)))
    return coordinator


def _read_queue_id(pool: Pool) -> str:
    path = pool.control_dir / "queue.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=QueueFile).queue_id
    except (OSError, msgspec.MsgspecError) as error:
        raise CorruptDataError(f"{path} can't be read: {error}.", next_step="Restore it from a copy.") from error
