"""A queue belongs to one run, and a run to one queue: positions of one mean nothing in another."""

from __future__ import annotations

import uuid
from pathlib import Path

import msgspec

from recovery.own_records import read_own_record
from storage.files import make_folder, write_atomically
from vime.errors import RestoreError


class Claim(msgspec.Struct, frozen=True):
    """Written on both sides; `token` is new for each pair, the paths are for messages."""

    token: str
    run: str
    queue: str


def run_claim_path(run: Path) -> Path:
    return run / "rollout" / "queue.json"


def queue_claim_path(queue: Path) -> Path:
    return queue / "vime" / "run.json"


def claim_queue(run: Path, queue: Path, *, has_commits: bool) -> None:
    """Bind a run folder and a queue that is new to each other; later, let only this pair go on.

    Raises:
        RestoreError: the queue belongs to another run, or it isn't the one that the run's commits count positions of.
    """
    if is_claimed(run, queue, has_commits=has_commits):
        return
    claim = msgspec.json.encode(Claim(uuid.uuid4().hex, str(run), str(queue)))
    write_atomically(run_claim_path(run), claim)
    make_folder(queue_claim_path(queue).parent)
    write_atomically(queue_claim_path(queue), claim)


def is_claimed(run: Path, queue: Path, *, has_commits: bool) -> bool:
    """Whether run folder and queue are bound to each other already; False when they still can be. Reads only.

    Raises:
        RestoreError: as `claim_queue`.
    """
    ours, theirs = read_claim(run_claim_path(run)), read_claim(queue_claim_path(queue))
    if ours is not None and theirs is not None and ours.token == theirs.token:
        _refuse_copy(run, queue, theirs)
        return True
    if theirs is not None or (queue / "vime" / "queue.json").exists():
        owner = "another run" if theirs is None else f"the run in {theirs.run}"
        raise RestoreError(
            f"The queue in {queue} belongs to {owner}, not to the one in {run}.",
            next_step="Give another --rollout-data-dir, or the --save of the run that the queue belongs to.",
        )
    if has_commits:
        before = "" if ours is None else f"; it was in {ours.queue}"
        raise RestoreError(
            f"{run} has commits, but their queue is not in {queue}{before}.",
            next_step="Give the --rollout-data-dir that the run was started with, or begin anew in another --save.",
        )
    return False


def refuse_unbound(run: Path, queue: Path) -> None:
    """Raise `RestoreError` unless the run folder and the queue are bound to each other."""
    ours, theirs = read_claim(run_claim_path(run)), read_claim(queue_claim_path(queue))
    if ours is None or theirs is None or ours.token != theirs.token:
        owner = "no run that is known" if theirs is None else f"the run in {theirs.run}"
        raise RestoreError(
            f"The queue in {queue} belongs to {owner}, not to the one in {run}.",
            next_step="Give the run folder that the queue belongs to, or the --pool of this run.",
        )
    _refuse_copy(run, queue, theirs)


def _refuse_copy(run: Path, queue: Path, theirs: Claim) -> None:
    """Raise `RestoreError` for a copy of a run folder whose queue was not copied with it, while the original exists."""
    original = Path(theirs.run)
    if queue.resolve().is_relative_to(run.resolve()) or not original.is_dir() or original.samefile(run):
        return
    claim = read_claim(run_claim_path(original))
    if claim is not None and claim.token == theirs.token:
        raise RestoreError(
            f"{run} is a copy of the run in {original}, and the queue in {queue} belongs to the original.",
            next_step="Use the original, or copy the queue into the run folder, as rollout_data/pool.",
        )


def read_claim(path: Path) -> Claim | None:
    """One side of a claim, None before the first. Raises `RestoreError`."""
    return read_own_record(path, Claim) if path.exists() else None
