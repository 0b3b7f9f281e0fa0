"""Publishing into a pool: one transaction at a time, through a writer of straw that is replaced when needed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import straw
from straw import errors

from storage.ended_writers import mark_writer_ended
from storage.live import Live
from storage.refs import PoolRef, from_straw_ref
from vime.errors import StorageError

logger = logging.getLogger(__name__)

MAX_PUBLICATIONS = 4096
"""Publications through one writer of straw, which keeps about 3 KB of memory for each as long as it is open."""


class PoolWriter:
    """Thread-safe; publications of several threads follow one another."""

    def __init__(
        self,
        open_store: Callable[[], AbstractContextManager[straw.SharedFilesystemStore]],
        root: Path,
    ) -> None:
        self._live, self._root = Live(open_store, root), root
        self._num_publications = 0
        self._writer_ids: list[str] = []
        """Writers of straw that have published here and are not marked as ended; the last one is in use."""
        self._lock = threading.Lock()

    def publish(self, publications: Sequence[straw.Publication], submission_id: str) -> list[PoolRef]:
        """Make publications durable in one transaction; their references in the same order.

        A submission id is known to one writer of straw only. The same id with the same content gives the same
        references from the same writer. When the storage failed, the next writer first looks whether the one before
        it recorded a result, and publishes again when it finds none; a copy that was written but not recorded stays
        unreferenced, which is harmless: only what the queue accepts counts. Raises `DiskFullError`, after which the
        same call may be repeated, and `StorageError`.
        """
        num_bytes = sum(len(record.payload) for publication in publications for record in publication.records)
        tried: list[str] = []

        def publish(store: straw.SharedFilesystemStore) -> list[straw.RecordSetRef]:
            recorded = _recorded(store, tried, submission_id) if tried else None
            if recorded is not None:
                return recorded
            tried.append(store.writer_id)
            if store.writer_id not in self._writer_ids:
                self._writer_ids.append(store.writer_id)
            written = list(store.publish_many(publications, submission_id=submission_id))
            check_in_place(self._root, *{ref.manifest.segment.path for ref in written})
            return written

        with self._lock:
            refs = self._live.call(f"publish {submission_id}", publish, num_bytes=num_bytes)
            self._mark_ended(self._writer_ids[:-1])
            self._num_publications += len(refs)
            if self._num_publications >= MAX_PUBLICATIONS:
                self._num_publications = 0
                self._live.renew()
                self._mark_ended(self._writer_ids)
        return [from_straw_ref(ref) for ref in refs]

    def close(self) -> None:
        """Wait for a running publication, then close the writer."""
        with self._lock:
            self._live.close()
            self._mark_ended(self._writer_ids)

    def _mark_ended(self, writer_ids: Sequence[str]) -> None:
        """Let the queue reclaim also the last packs of writers that were closed or replaced.

        Where that fails, for example because the mount is gone, the next session does it.
        """
        for writer_id in list(writer_ids):
            self._writer_ids.remove(writer_id)
            try:
                check_in_place(self._root)
                mark_writer_ended(self._root / "vime", writer_id)
            except (errors.StorageUnavailable, StorageError) as error:
                logger.warning("writer %s of %s is not marked as ended: %s", writer_id, self._root, str(error))


def check_in_place(root: Path, *paths: str) -> None:
    """Raise straw's `StorageUnavailable` when the pool, or one of its files `paths`, is not under `root`.

    A mount that went away leaves an empty folder, in which straw would write as in any other.
    """
    for path in ("vime/pool.json", *paths):
        try:
            is_there = (root / path).exists()
        except OSError as error:  # the client of a mount that is still there has died
            raise errors.StorageUnavailable(f"{root / path} can't be reached: {error.strerror}") from error
        if not is_there:
            raise errors.StorageUnavailable(f"{root / path} is not there: its file system is not mounted")


def _recorded(
    store: straw.SharedFilesystemStore, writer_ids: Sequence[str], submission_id: str
) -> list[straw.RecordSetRef] | None:
    """What an earlier writer recorded for the submission; None when nothing, or when it can't be asked."""
    for writer_id in writer_ids:
        try:
            refs = store.publication_receipt(writer_id, api="publish", submission_id=submission_id)
        except (errors.QueueError, OSError) as error:
            logger.warning("writer %s can't be asked for %s: %s", writer_id, submission_id, str(error))
            continue
        if refs is not None:
            return list(refs)
    return None
