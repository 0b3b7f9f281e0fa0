"""A resource of the pool that is opened when it is first used and replaced when it failed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from time import sleep
from typing import Generic, TypeVar

from straw import errors as straw

from storage.straw_errors import translated
from vime.errors import StorageError

logger = logging.getLogger(__name__)

RETRY_WAITS_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Pauses before a failed call is repeated with a fresh resource; a JuiceFS client is back within them."""

_Resource = TypeVar("_Resource")
_Result = TypeVar("_Result")

_FAILED = (straw.StorageUnavailable, straw.IndeterminateCommit, straw.WriterFenced, straw.UnsafeRecovery, OSError)
"""After these an open store is of no more use: it stays broken when the mount is back, or the disk has space again."""


class Live(Generic[_Resource]):
    """Holds one resource of a pool, such as its writing store. Thread-safe."""

    def __init__(self, open_resource: Callable[[], AbstractContextManager[_Resource]], root: Path) -> None:
        self._open_resource, self._root = open_resource, root
        self._lock = threading.Lock()
        self._opened: tuple[AbstractContextManager[_Resource], _Resource] | None = None
        self._closed = False

    def call(
        self,
        what: str,
        work: Callable[[_Resource], _Result],
        *,
        num_bytes: int = 0,
        hopeless: Callable[[], bool] = lambda: False,
    ) -> _Result:
        """`work` on the resource, repeated with a fresh one while the storage fails, at most `RETRY_WAITS_S` times.

        `what` and `num_bytes` (to be written) are for messages; no repeat when `hopeless` says so. Raises what
        `translated` raises.
        """
        with translated(what, self._root, num_bytes=num_bytes):
            for wait_s in (*RETRY_WAITS_S, None):
                resource = None
                try:
                    resource = self._open()
                    return work(resource)
                except straw.QuotaExceeded:
                    raise
                except (RuntimeError, OSError) as error:
                    if not isinstance(error, _FAILED) and not self._was_replaced(resource):
                        raise
                    self._replace(resource)
                    if wait_s is None or hopeless():
                        tries = f" (tried {len(RETRY_WAITS_S) + 1} times in {sum(RETRY_WAITS_S):g} s)"
                        raise straw.StorageUnavailable(f"{error}{tries if wait_s is None else ''}") from error
                    logger.warning("%s failed (%s); repeated with a fresh store in %g s", what, str(error), wait_s)
                sleep(wait_s)
        raise AssertionError("the last try returns or raises")

    def renew(self) -> None:
        """Close the resource; the next call opens a fresh one."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            self._close_quietly(opened[0])

    def close(self) -> None:
        """Close the resource for good."""
        with self._lock:
            self._closed = True
        self.renew()

    def _open(self) -> _Resource:
        with self._lock:
            if self._closed:
                raise StorageError(f"The pool {self._root} is closed.", next_step="Open it again.")
            if self._opened is None:
                manager = self._open_resource()
                self._opened = manager, manager.__enter__()
            return self._opened[1]

    def _was_replaced(self, resource: _Resource | None) -> bool:
        """Whether another thread has replaced, and so closed, the resource that a call used."""
        with self._lock:
            return resource is not None and (self._opened is None or self._opened[1] is not resource)

    def _replace(self, failed: _Resource | None) -> None:
        """Let go of a failed resource, unless another thread has replaced it already."""
        with self._lock:
            if self._opened is None or self._opened[1] is not failed:
                return
            (manager, _), self._opened = self._opened, None
        self._close_quietly(manager)

    def _close_quietly(self, manager: AbstractContextManager[_Resource]) -> None:
        """What was acknowledged is durable, whether the old store closes in order or not."""
        try:
            manager.__exit__(None, None, None)
        except (straw.QueueError, OSError) as error:
            # The text alone: a kept log record would hold the error, its frames, and so the store and its open files.
            logger.warning("a store of %s did not close: %s", self._root, str(error))
