"""The commit record: one immutable file that makes a checkpoint and its queue state valid together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from storage.files import make_folder, sha256_of, sync_tree, write_atomically, write_once
from storage.queue_types import MemorySnapshot
from vime.errors import CommitError
from vime.utils.kill_points import KillPoint, reach

COMMIT_VERSION = 1
TRACKER = "latest_checkpointed_iteration.txt"
_Record = TypeVar("_Record", bound=msgspec.Struct)
_COMMIT_NAME = re.compile(r"committed_(\d+)\.json")


class FileDigest(msgspec.Struct, frozen=True):
    """Size in bytes and hex SHA-256 of one file of a commit."""

    size: int
    sha256: str


class CommitParent(msgspec.Struct, frozen=True):
    """The commit that a branch started from."""

    branch: str
    rollout_id: int


class CommitRecord(msgspec.Struct, frozen=True):
    """Everything that was true when rollout `rollout_id` had been trained."""

    rollout_id: int
    branch: str
    parent: CommitParent | None
    weight_version: int
    run_id: str
    rollout_data_dir: str
    files: dict[str, FileDigest]
    """Path relative to the commit's folder -> digest."""
    resumable: bool = True
    version: int = COMMIT_VERSION


class _Versioned(msgspec.Struct, frozen=True):
    version: int


class QueueState(msgspec.Struct, frozen=True):
    """The queue at a commit: what the branch had trained, and how far the prompts had been handed out."""

    trained: list[tuple[int, int]]
    """Queue positions trained along the branch, as (first, last) ranges."""
    next_group_index: int
    identity: dict[str, int]
    memory: MemorySnapshot | None = None
    """What a queue in memory needs to go on from here; None for a queue on disk, which keeps itself."""
    version: int = COMMIT_VERSION
    accepted: list[tuple[int, int]] = []
    """Positions of all groups that had been accepted, as ranges."""


def iteration_directory(directory: Path, rollout_id: int) -> Path:
    return directory / f"iter_{rollout_id:07d}"


def commit_path(directory: Path, rollout_id: int) -> Path:
    return directory / "rollout" / f"committed_{rollout_id}.json"


def queue_state_path(directory: Path, rollout_id: int) -> Path:
    return directory / "rollout" / f"queue_state_{rollout_id}.json"


def write_commit(
    directory: Path,
    *,
    rollout_id: int,
    branch: str,
    parent: CommitParent | None,
    weight_version: int,
    run_id: str,
    rollout_data_dir: str,
    queue_state: QueueState,
) -> Path:
    """Make the checkpoint in `iter_<rollout_id>` a commit; the record is written last, after everything is synced.

    Raises:
        CommitError: the checkpoint has no file, or this rollout has a commit already.
    """
    checkpoint = iteration_directory(directory, rollout_id)
    payload = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    if not payload:
        raise CommitError(
            f"{checkpoint}: the checkpoint has no file, so it can't be committed.",
            next_step="Look at the trainer's logs and the mount, then run the same command again.",
        )
    make_folder(directory / "rollout")
    state_path = queue_state_path(directory, rollout_id)
    write_atomically(state_path, msgspec.json.format(msgspec.json.encode(queue_state), indent=1))
    sync_tree(checkpoint)
    record = CommitRecord(
        rollout_id=rollout_id,
        branch=branch,
        parent=parent,
        weight_version=weight_version,
        run_id=run_id,
        rollout_data_dir=rollout_data_dir,
        files=_digests(directory, [*payload, state_path]),
    )
    path = commit_path(directory, rollout_id)
    reach(KillPoint.BEFORE_COMMIT)
    try:
        write_once(path, msgspec.json.format(msgspec.json.encode(record), indent=1))
    except FileExistsError as error:
        raise CommitError(
            f"{path} exists already, and commits are never replaced.",
            next_step="Run the same command again; it goes on from the newest commit.",
        ) from error
    reach(KillPoint.AFTER_COMMIT)
    write_atomically(directory / TRACKER, str(rollout_id).encode())
    return path


def committed_rollouts(directory: Path) -> list[int]:
    """Rollouts that have a commit record in `directory`, ascending. Nothing is verified yet."""
    names = (path.name for path in (directory / "rollout").glob("committed_*.json"))
    return sorted(int(match.group(1)) for name in names if (match := _COMMIT_NAME.fullmatch(name)))


def read_commit(path: Path) -> CommitRecord:
    """Read a commit record and compare every file of it with its digest.

    Raises:
        CommitError: the record is missing, of a newer version, not resumable, or a file is missing or differs;
            the message names the file, what was expected and what was found.
    """
    record = _decode(path, CommitRecord)
    if path != commit_path(path.parent.parent, record.rollout_id):
        raise CommitError(
            f"{path}: it is the record of rollout {record.rollout_id}, under another name.",
            next_step="Restore the file's name, or choose another commit with --ckpt-step.",
        )
    if not record.resumable:
        raise CommitError(f"{path}: marked as not resumable.", next_step="Choose another commit with --ckpt-step.")
    directory = path.parent.parent
    for name, expected in record.files.items():
        _check_file(path, directory / name, expected)
    return record


def read_record(path: Path) -> CommitRecord:
    """Read a commit record alone. Raises `CommitError` when it is missing, damaged, or of a newer version."""
    return _decode(path, CommitRecord)


def read_queue_state(directory: Path, rollout_id: int) -> QueueState:
    """The queue state of a commit (verify the commit first)."""
    return _decode(queue_state_path(directory, rollout_id), QueueState)


def _digests(directory: Path, paths: Iterable[Path]) -> dict[str, FileDigest]:
    return {str(path.relative_to(directory)): FileDigest(path.stat().st_size, sha256_of(path)) for path in paths}


def _check_file(commit: Path, path: Path, expected: FileDigest) -> None:
    next_step = f"{_older_commit(commit)}, or restore the file."
    if not path.is_file():
        raise CommitError(f"{commit}: its file {path} is missing.", next_step=next_step)
    size = path.stat().st_size
    if size != expected.size:
        raise CommitError(f"{path}: {size} bytes, the commit expects {expected.size}.", next_step=next_step)
    found = sha256_of(path)
    if found != expected.sha256:
        raise CommitError(f"{path}: SHA-256 is {found}, the commit expects {expected.sha256}.", next_step=next_step)


def _older_commit(commit: Path) -> str:
    """Which commit to take in place of a damaged one."""
    rollout_id = int(commit.stem.removeprefix("committed_"))
    older = [rollout for rollout in committed_rollouts(commit.parent.parent) if rollout < rollout_id]
    return f"Resume from the commit before it with --ckpt-step {older[-1]}" if older else "There is no older commit"


def _decode(path: Path, kind: type[_Record]) -> _Record:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CommitError(f"{path}: {error.strerror}.", next_step="Choose another commit.") from error
    try:
        version = msgspec.json.decode(content, type=_Versioned).version
        if version > COMMIT_VERSION:
            raise CommitError(
                f"{path}: version {version}, this vime reads up to {COMMIT_VERSION}.", next_step="Use a newer vime."
            )
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise CommitError(f"{path}: damaged ({error}).", next_step="Choose another commit with --ckpt-step.") from error
