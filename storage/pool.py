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
import numpy as np
import straw
from straw.backend import FilesystemBackend

from storage.columns import DTYPES, Array, ColumnSpec, EncodedGroup, read_header
from storage.files import sync_directory, write_atomically
from storage.os_errors import os_error
from storage.refs import GroupRef, PoolRef, from_straw_ref, lease_from_bytes, to_straw_ref
from storage.straw_errors import translated
from vime.errors import CorruptDataError, StorageError

Profile = Literal["local", "juicefs"]
CODECS = ("bytes.v1", "json.v1", "tensor.v1")
MAX_PROMPTS_PER_SEGMENT = 64
"""straw re-reads a segment's whole index for each input that a task names, so long segments cost quadratic time."""


class PoolFile(msgspec.Struct, frozen=True):
    """`vime/pool.json`: what every process must agree on to open the pool."""

    schema_version: int
    run_id: str
    profile: Profile
    online_gc: bool
    declaration: dict[str, Any] | None
    created_on: str


class Pool:
    """Payloads of one run under one root. Thread-safe; belongs to the process that made it (straw can't fork)."""

    def __init__(self, root: Path, file: PoolFile, fault: Callable[[str], None] | None) -> None:
        self.root = root
        self.run_id = file.run_id
        self.profile = file.profile
        self._write_lock = threading.Lock()
        self._exit = ExitStack()
        self._closed = False
        try:
            backend = FilesystemBackend(root, profile=file.profile, declaration=file.declaration, fault=fault)
        except ValueError as error:
            raise StorageError(f"{root}: {error}.", next_step="Correct the storage profile's declaration.") from error
        with translated(f"open pool {root}", root):
            self._store = self._exit.enter_context(
                straw.SharedFilesystemStore(root, file.run_id, backend=backend, codecs=CODECS, online_gc=file.online_gc)
            )
            self._reader = self._exit.enter_context(self._store.read_session())

    @classmethod
    def create(
        cls,
        root: Path | str,
        run_id: str,
        *,
        profile: Profile = "local",
        declaration: dict[str, Any] | None = None,
        online_gc: bool = False,
        fault: Callable[[str], None] | None = None,
    ) -> Pool:
        """Make a pool in `root` and open it.

        `profile`, `declaration` (what the operator asserts about a JuiceFS mount; straw refuses a wrong one) and
        `online_gc` hold for the life of the pool. `fault` is called with the name of every I/O phase (for tests).
        Raises `StorageError` when `root` already holds a pool.
        """
        root = Path(root).resolve()
        path = root / "vime" / "pool.json"
        if path.exists():
            raise StorageError(
                f"{root} already holds a pool (run id {_read_pool_file(path).run_id!r}).",
                next_step="Open it to continue that run, or choose an empty folder.",
            )
        file = PoolFile(1, run_id, profile, online_gc, declaration, socket.gethostname())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            sync_directory(root)
        except OSError as error:
            raise os_error(error, root, 0) from error
        pool = cls(root, file, fault)
        try:
            write_atomically(path, msgspec.json.encode(file))
        except OSError as error:
            pool.close()
            raise os_error(error, path, 0) from error
        return pool

    @classmethod
    def open(cls, root: Path | str, run_id: str | None = None, *, fault: Callable[[str], None] | None = None) -> Pool:
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
        return cls(root, file, fault)

    @property
    def control_dir(self) -> Path:
        """Folder of vime's own small files: lock, epochs, queue name, trained log."""
        return self.root / "vime"

    @property
    def store(self) -> straw.SharedFilesystemStore:
        """The straw store, for the queue's coordinator."""
        return self._store

    def publish_groups(self, items: Sequence[tuple[EncodedGroup, bytes]], *, submission_id: str) -> list[GroupRef]:
        """Make (group, lease) pairs durable in one transaction; references in the same order.

        The same `submission_id` with the same content returns the same references. Raises `StorageError`.
        """
        publications = []
        for number, (group, lease_bytes) in enumerate(items):
            lease = lease_from_bytes(lease_bytes)
            owner = {"task_id": lease.task_id, "attempt_id": lease.attempt_id}
            records = [straw.Record(f"{number}.header", group.header, metadata=owner)]
            records += [
                straw.Record(f"{number}.{name}", _little_endian_bytes(array), metadata=owner)
                for name, array in group.columns.items()
            ]
            publications.append(straw.Publication(tuple(records)))
        return self._publish(publications, submission_id)

    def publish_prompts(self, payloads: Sequence[bytes], *, submission_id: str) -> list[PoolRef]:
        """Make prompt payloads durable, at most `MAX_PROMPTS_PER_SEGMENT` in one transaction."""
        refs: list[PoolRef] = []
        for start in range(0, len(payloads), MAX_PROMPTS_PER_SEGMENT):
            part = payloads[start : start + MAX_PROMPTS_PER_SEGMENT]
            publications = [straw.Publication((straw.Record(f"{i}", data),)) for i, data in enumerate(part)]
            refs += self._publish(publications, f"{submission_id}:{start}")
        return refs

    def publish_blob(self, data: bytes, *, submission_id: str) -> PoolRef:
        """Make one byte string durable."""
        return self._publish([straw.Publication((straw.Record("blob", data),))], submission_id)[0]

    def check_published_for(self, ref: GroupRef, *, task_id: str, attempt_id: str) -> None:
        """Raise `StorageError` unless a group is in the pool and was published for this attempt."""
        self._check_open()
        with translated(f"{task_id}: the result of attempt {attempt_id}", self.root):
            self._reader.validate(to_straw_ref(ref), task_id=task_id, attempt_id=attempt_id)

    def read_header(self, ref: GroupRef) -> bytes:
        """Header bytes of a group. Raises `CorruptDataError` or `StorageError`."""
        return self._read(ref, [0])[0]

    def read_blob(self, ref: PoolRef) -> bytes:
        """The bytes of a blob or prompt. Raises `CorruptDataError` or `StorageError`."""
        return self._read(ref, [0])[0]

    def read_columns(self, ref: GroupRef, names: Sequence[str]) -> dict[str, Array]:
        """Columns of a group by name; only these are read. Raises `StorageError` for a name that it lacks."""
        table = read_header(self.read_header(ref)).columns
        ordinals = {spec.name: ordinal for ordinal, spec in enumerate(table, start=1)}
        missing = [name for name in names if name not in ordinals]
        if missing:
            raise StorageError(f"The group in {ref.path} has no columns {missing}, it has {sorted(ordinals)}.")
        payloads = self._read(ref, [ordinals[name] for name in names])
        specs = [table[ordinals[name] - 1] for name in names]
        return {spec.name: _array(spec, data, ref) for spec, data in zip(specs, payloads, strict=True)}

    def read_group(self, ref: GroupRef) -> EncodedGroup:
        """The whole group: header and all columns."""
        header = self.read_header(ref)
        return EncodedGroup(header, self.read_columns(ref, [spec.name for spec in read_header(header).columns]))

    def close(self) -> None:
        """Close the reader and the writer; what was published stays."""
        self._closed = True
        with self._write_lock, translated("close the pool", self.root):
            self._exit.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _publish(self, publications: list[straw.Publication], submission_id: str) -> list[PoolRef]:
        if not publications:
            return []
        self._check_open()
        num_bytes = sum(len(record.payload) for publication in publications for record in publication.records)
        with self._write_lock, translated(f"publish {submission_id}", self.root, num_bytes=num_bytes):
            return [from_straw_ref(r) for r in self._store.publish_many(publications, submission_id=submission_id)]

    def _read(self, ref: PoolRef, ordinals: list[int]) -> list[bytes]:
        self._check_open()
        with translated(f"read {self.root / ref.path}", self.root):
            members = self._reader.manifest(to_straw_ref(ref))["records"]
            if max(ordinals, default=0) >= len(members):
                raise CorruptDataError(f"{ref.path} has {len(members)} records, record {max(ordinals)} was asked for.")
            records = [straw.RecordRef.from_dict(members[ordinal]) for ordinal in ordinals]
            return [bytes(self._reader.read_record(record).payload) for record in records]

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"The pool {self.root} is closed.", next_step="Open it again.")


def _read_pool_file(path: Path) -> PoolFile:
    try:
        file = msgspec.json.decode(path.read_bytes(), type=PoolFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise CorruptDataError(f"{path} can't be read: {error}.", next_step="Restore it from a copy.") from error
    return file


def _little_endian_bytes(array: Array) -> memoryview:
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
    return flat.view(np.uint8).data


def _array(spec: ColumnSpec, data: bytes, ref: PoolRef) -> Array:
    if spec.dtype not in DTYPES:
        raise CorruptDataError(f"{ref.path}: column {spec.name!r} has dtype {spec.dtype!r}, allowed: {list(DTYPES)}.")
    try:
        return np.frombuffer(data, DTYPES[spec.dtype]).reshape(spec.shape)
    except ValueError as error:
        raise CorruptDataError(
            f"{ref.path}: column {spec.name!r} has {len(data)} bytes, its shape is {spec.shape} of {spec.dtype}."
        ) from error
