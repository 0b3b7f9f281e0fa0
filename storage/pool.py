"""The pool: one long-lived straw store per process, where payloads become durable before anyone refers to them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec
import straw
from straw.backend import FilesystemBackend

from storage.columns import Array, EncodedGroup
from storage.files import sync_directory, write_atomically
from storage.group_records import group_payloads
from storage.live import Live
from storage.os_errors import os_error
from storage.pool_writer import check_in_place
from storage.pool_writers import PoolWriters
from storage.reader import GroupReader, ReadingStore
from storage.refs import GroupRef, PoolRef, lease_from_bytes
from storage.straw_errors import translated
from vime.errors import CorruptDataError, StorageError

Profile = Literal["local", "juicefs"]
CODECS = ("bytes.v1", "json.v1", "tensor.v1")
MAX_PROMPTS_TOGETHER = 256
"""Prompts of one publication: who reads one of them parses the list of all, once."""


class PoolFile(msgspec.Struct, frozen=True):
    """`vime/pool.json`: what every process must agree on to open the pool."""

    schema_version: int
    run_id: str
    profile: Profile
    declaration: dict[str, Any] | None
    created_on: str


class Pool:
    """Payloads of one run under one root. Thread-safe; belongs to the process that made it (straw can't fork).

    What it opens of straw is opened when first used: the store that a queue's coordinator works on, the writers and
    the reader. Writers and reader are replaced when the storage failed, for example when a mount came back.
    """

    def __init__(
        self, root: Path, file: PoolFile, fault: Callable[[str], None] | None, segment_bytes: int | None = None
    ) -> None:
        self.root = root
        self.run_id = file.run_id
        self.profile = file.profile
        self._file, self._fault, self._segment_bytes = file, fault, segment_bytes
        self._exit = ExitStack()
        self._lock = threading.Lock()
        self._segment_bytes = segment_bytes
        self._store: straw.SharedFilesystemStore | None = None
        with translated(f"open pool {root}", root):
            self._new_store()  # refuses a declaration that is wrong
        self._writers = PoolWriters(self._store_in_place, root)
        self._reading = Live(lambda: ReadingStore.opened(self._store_in_place()), root)
        self._reader = GroupReader(self._reading, root)

    @classmethod
    def create(
        cls,
        root: Path | str,
        run_id: str,
        *,
        profile: Profile = "local",
        declaration: dict[str, Any] | None = None,
        fault: Callable[[str], None] | None = None,
        segment_bytes: int | None = None,
    ) -> Pool:
        """Make a pool in `root` and open it.

        `profile` and `declaration` (what the operator asserts about a JuiceFS mount; straw refuses a wrong one) hold
        for the life of the pool. `fault` is called with the name of every I/O phase (for tests).
        A pack gets no more publications once it has `segment_bytes`; straw's own size when None.
        Raises `StorageError` when `root` already holds a pool.
        """
        root = Path(root).resolve()
        path = root / "vime" / "pool.json"
        if path.exists():
            raise StorageError(
                f"{root} already holds a pool (run id {_read_pool_file(path).run_id!r}).",
                next_step="Open it to continue that run, or choose an empty folder.",
            )
        file = PoolFile(1, run_id, profile, declaration, socket.gethostname())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            sync_directory(root)
        except OSError as error:
            raise os_error(error, root, 0) from error
        pool = cls(root, file, fault, segment_bytes)
        try:
            write_atomically(path, msgspec.json.encode(file))
        except OSError as error:
            pool.close()
            raise os_error(error, path, 0) from error
        return pool

    @classmethod
    def open(
        cls,
        root: Path | str,
        run_id: str | None = None,
        *,
        fault: Callable[[str], None] | None = None,
        segment_bytes: int | None = None,
    ) -> Pool:
        """Open an existing pool. Raises `StorageError` when there is none or it belongs to another run."""
        root = Path(root).resolve()
        path = root / "vime" / "pool.json"
        if not path.exists():
            raise StorageError(
                f"{root} holds no pool ({path} does not exist).",
                next_step="Check the path and that the file system is mounted, or start a new run.",
            )
        file = _read_pool_file(path)
        if run_id is not None and run_id != file.run_id:
            raise StorageError(
                f"{root} belongs to run {file.run_id!r}, not to {run_id!r}.",
                next_step="Use that run id, or another folder.",
            )
        return cls(root, file, fault, segment_bytes)

    @property
    def control_dir(self) -> Path:
        """Folder of vime's own small files: lock, epochs, queue name, trained log."""
        return self.root / "vime"

    @property
    def store(self) -> straw.SharedFilesystemStore:
        """The straw store that a queue's coordinator works on."""
        with self._lock:
            if self._store is None:
                self._store = self._exit.enter_context(self._store_in_place())
            return self._store

    def publish_groups(self, items: Sequence[tuple[EncodedGroup, bytes]], *, submission_id: str) -> list[GroupRef]:
        """Make (group, lease) pairs durable in one transaction; references in the same order.

        Calls of several threads run side by side; of one thread, the same `submission_id` with the same content
        returns the same references. Raises `StorageError`.
        """
        publications = []
        for number, (group, lease_bytes) in enumerate(items):
            lease = lease_from_bytes(lease_bytes)
            owner = {"task_id": lease.task_id, "attempt_id": lease.attempt_id}
            records = tuple(
                straw.Record(f"{number}.{place}", payload, metadata=owner)
                for place, payload in enumerate(group_payloads(group))
            )
            publications.append(straw.Publication(records))
        return self._writers.publish(publications, submission_id)

    def publish_prompts(self, payloads: Sequence[bytes], *, submission_id: str) -> list[PoolRef]:
        """Make prompt payloads durable, at most `MAX_PROMPTS_TOGETHER` in one publication."""
        refs: list[PoolRef] = []
        for start in range(0, len(payloads), MAX_PROMPTS_TOGETHER):
            part = payloads[start : start + MAX_PROMPTS_TOGETHER]
            publication = straw.Publication(tuple(straw.Record(f"{i}", data) for i, data in enumerate(part)))
            (ref,) = self._writers.publish([publication], f"{submission_id}:{start}")
            refs += [msgspec.structs.replace(ref, record=record) for record in range(len(part))]
        return refs

    def publish_blob(self, data: bytes, *, submission_id: str) -> PoolRef:
        """Make one byte string durable."""
        return self._writers.publish([straw.Publication((straw.Record("blob", data),))], submission_id)[0]

    def read_header(self, ref: GroupRef) -> bytes:
        """Header bytes of a group. Raises `CorruptDataError` or `StorageError`."""
        return self._reader.read_header(ref)

    def read_blob(self, ref: PoolRef) -> bytes:
        """The bytes of a blob or prompt. Raises `CorruptDataError` or `StorageError`."""
        return self._reader.read_blob(ref)

    def read_columns(self, ref: GroupRef, names: Sequence[str]) -> dict[str, Array]:
        """Columns of a group by name; only these are read. Raises `StorageError` for a name that it lacks."""
        return self._reader.read_columns(ref, names)

    def read_rows(self, ref: GroupRef, column: str, member: int, start: int = 0, stop: int | None = None) -> Array:
        """Rows `start:stop` of a member in a row_major column, [stop - start, ...]; see `GroupReader.read_rows`."""
        return self._reader.read_rows(ref, column, member, start, stop)

    def num_rows(self, ref: GroupRef, column: str, member: int) -> int:
        """Rows of a member in a column, 0 without any; see `GroupReader.num_rows`."""
        return self._reader.num_rows(ref, column, member)

    def read_layers(
        self, ref: GroupRef, column: str, member: int, layers: range, start: int = 0, stop: int | None = None
    ) -> Array:
        """Rows of a member in some layers of a layer_major column; see `GroupReader.read_layers`."""
        return self._reader.read_layers(ref, column, member, layers, start, stop)

    def read_group(self, ref: GroupRef) -> EncodedGroup:
        """The whole group: header and all columns."""
        return self._reader.read_group(ref)

    def close(self) -> None:
        """Close the reader and the writers; what was published stays."""
        with ExitStack() as closing:
            closing.callback(self._close_store)
            closing.callback(self._writers.close)
            closing.callback(self._reading.close)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _close_store(self) -> None:
        with translated("close the pool", self.root):
            self._exit.close()

    def _store_in_place(self) -> straw.SharedFilesystemStore:
        """A new store of an existing pool; straw would make another pool where a file system is not mounted."""
        check_in_place(self.root)
        return self._new_store()

    def _new_store(self) -> straw.SharedFilesystemStore:
        file = self._file
        try:
            backend = FilesystemBackend(
                self.root, profile=file.profile, declaration=file.declaration, fault=self._fault
            )
        except ValueError as error:
            raise StorageError(
                f"{self.root}: {error}.", next_step="Correct the storage profile's declaration."
            ) from error
        size = {} if self._segment_bytes is None else {"segment_target_bytes": self._segment_bytes}
        return straw.SharedFilesystemStore(self.root, file.run_id, backend=backend, codecs=CODECS, **size)


def _read_pool_file(path: Path) -> PoolFile:
    try:
        file = msgspec.json.decode(path.read_bytes(), type=PoolFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise CorruptDataError(f"{path} can't be read: {error}.", next_step="Restore it from a copy.") from error
    return file
