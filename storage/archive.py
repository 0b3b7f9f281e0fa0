"""Debug archives: a small file that names the stored groups of a rollout batch, which their pool keeps for it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from storage.columns import EncodedGroup, decode_group
from storage.contracts import PayloadPool
from storage.debug_samples import write_pt
from storage.facts import task_of
from storage.files import make_folder, write_once
from storage.pool import Pool
from storage.refs import GroupRef, Lease
from storage.retention import Retention
from vime.errors import DataError
from vime.utils.types import Sample

FORMAT = "vime.straw-debug"
ARCHIVE_VERSION = 1
SUFFIX = ".straw.json"
OWN_POOL = "straw-data"
"""Folder beside an archive whose samples lie in no pool on disk."""


class ArchivedGroup(msgspec.Struct, frozen=True):
    """One group of an archive; `position` is its place in the queue, None where it had none."""

    ref: GroupRef
    group_index: int
    position: int | None
    sample_indices: list[int]
    """`Sample.index` of each member."""
    removed: list[int] = []
    """Members that a function of the user's own removed when the batch was planned."""


class ArchiveIndex(msgspec.Struct, frozen=True):
    """What the file of an archive says."""

    format: str
    version: int
    rollout_id: int
    evaluation: bool
    root: str
    """Pool, absolute."""
    relative_root: str
    """Pool as seen from the archive's folder, for copies of both; "" where they have nothing in common."""
    run_id: str
    storage_owner: str
    """Who keeps the payloads in the pool, whatever becomes of their groups."""
    groups: list[ArchivedGroup]


class _Kind(msgspec.Struct, frozen=True):
    format: str = ""
    version: int = 0


class ArchiveKey(NamedTuple):
    """Names of one sample: `sample:<index>`, and its group's task in the queue."""

    sample_key: str
    task_key: str


class RolloutArchive:
    """Samples of one rollout batch by reference. Use with `with`, or call `close`."""

    def __init__(self, path: Path, index: ArchiveIndex, pool: Pool) -> None:
        self.path, self.index, self.pool = path, index, pool

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open an archive and its pool.

        Raises `DataError` when the file is missing, no archive or of a newer version, or its pool isn't there.
        """
        path = Path(path).absolute()
        index = _read_index(path)
        root = _pool_of(path, index)
        return cls(path, index, Pool.open(root, index.run_id))

    @classmethod
    def save(
        cls, path: Path | str, pool: Pool, groups: Sequence[ArchivedGroup], *, rollout_id: int, evaluation: bool = False
    ) -> ArchiveIndex:
        """Write an archive of groups in `pool`, which keeps their payloads from now on until `release`.

        Raises `FileExistsError` when the path is there with other content: archives are never replaced.
        """
        path = Path(path).absolute()
        content = msgspec.json.encode([rollout_id, evaluation, list(groups)])
        index = ArchiveIndex(
            format=FORMAT,
            version=ARCHIVE_VERSION,
            rollout_id=rollout_id,
            evaluation=evaluation,
            root=str(pool.root),
            relative_root=_relative(pool.root, path.parent),
            run_id=pool.run_id,
            storage_owner=f"debug:{path}:{hashlib.sha256(content).hexdigest()[:16]}",
            groups=list(groups),
        )
        if path.exists() and _read_index(path) == index:
            return index
        make_folder(path.parent)
        retention = Retention(pool.control_dir)
        retention.retain(index.storage_owner, [group.ref for group in groups])
        try:
            write_once(path, msgspec.json.format(msgspec.json.encode(index), indent=1))
        except FileExistsError:
            retention.let_go(index.storage_owner)
            raise
        return index

    @property
    def rollout_id(self) -> int:
        return self.index.rollout_id

    @property
    def keys(self) -> list[ArchiveKey]:
        """Names of all samples, in order."""
        return [
            ArchiveKey(f"sample:{index}", task_of(group.group_index))
            for group in self.index.groups
            for index in group.sample_indices
        ]

    def load_samples(self, sample_key: str | None = None, task_key: str | None = None) -> list[Sample]:
        """The samples that have the given names, in order; all without names. Other groups are not read.

        Raises `KeyError` when no sample has a given name, `StorageError` for a payload that can't be read.
        """
        found = []
        for group in self.index.groups:
            wanted = [
                member
                for member, index in enumerate(group.sample_indices)
                if sample_key in (None, f"sample:{index}") and task_key in (None, task_of(group.group_index))
            ]
            if wanted:
                members = read_samples(self.pool, group.ref, group.removed)
                found += [members[member] for member in wanted]
        if not found and (sample_key is not None or task_key is not None):
            raise KeyError(f"{self.path}: no sample with sample_key {sample_key!r} and task_key {task_key!r}")
        return found

    def export_pt(self, path: Path | str) -> None:
        """Write all samples as a `.pt` file of plain types and tensors; see `storage.debug_samples`."""
        write_pt(Path(path), self.rollout_id, self.load_samples())

    def release(self) -> None:
        """Let the pool reclaim the payloads when nothing else needs them; the archive may be unreadable then."""
        Retention(self.pool.control_dir).let_go(self.index.storage_owner)

    def close(self) -> None:
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_samples(pool: PayloadPool, ref: GroupRef, removed: Sequence[int] = ()) -> list[Sample]:
    """All members of a stored group, those in `removed` marked so. Raises `StorageError`."""
    stored = pool.read_group(ref)
    samples = decode_group(stored.header, stored.columns)
    for member in removed:
        samples[member].remove_sample = True
    return samples


def publish_copies(pool: PayloadPool, groups: Sequence[EncodedGroup], *, submission_id: str) -> list[GroupRef]:
    """Make groups durable in `pool` under no queue's lease; references in the same order. Raises `StorageError`."""
    owners = [
        msgspec.msgpack.encode(Lease(pool.run_id, "debug", f"{submission_id}:{number}", f"{number}", 1, "", "", ""))
        for number in range(len(groups))
    ]
    return pool.publish_groups(list(zip(groups, owners, strict=True)), submission_id=submission_id)


def create_or_open_pool(root: Path, run_id: str) -> Pool:
    """The pool in `root`, made where there is none."""
    return Pool.open(root, run_id) if (root / "vime" / "pool.json").exists() else Pool.create(root, run_id)


def _read_index(path: Path) -> ArchiveIndex:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"Debug archive {path}: {error.strerror}.", next_step="Check the path.") from error
    try:
        kind = msgspec.json.decode(content, type=_Kind)
    except msgspec.MsgspecError as error:
        raise DataError(f"Debug archive {path} can't be read: {error}.", next_step="Restore the file.") from error
    if kind.format != FORMAT or kind.version > ARCHIVE_VERSION:
        raise DataError(
            f"{path} has format {kind.format!r}, version {kind.version}; allowed: {FORMAT!r}, "
            f"version {ARCHIVE_VERSION} or older.",
            next_step="Name a file that --save-debug-rollout-data wrote.",
        )
    try:
        return msgspec.json.decode(content, type=ArchiveIndex)
    except msgspec.MsgspecError as error:
        raise DataError(f"Debug archive {path} can't be read: {error}.", next_step="Restore the file.") from error


def _pool_of(path: Path, index: ArchiveIndex) -> Path:
    places = [Path(index.root)] + ([path.parent / index.relative_root] if index.relative_root else [])
    for place in places:
        if (place / "vime" / "pool.json").exists():
            return place
    raise DataError(
        f"Debug archive {path}: its pool is not there (looked in {', '.join(map(str, places))}).",
        next_step="Mount or copy the pool there, or use a .pt file, which holds the samples themselves.",
    )


def _relative(root: Path, folder: Path) -> str:
    """`root` as seen from `folder`, "" when they share no folder but that of the file system."""
    folder = folder.resolve()
    for up, parent in enumerate([folder, *folder.parents][:-1]):
        if root.is_relative_to(parent):
            return str(Path(*[".."] * up) / root.relative_to(parent))
    return ""
