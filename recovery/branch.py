"""Branches of a run: every start or resume opens one, and each knows the commit that it grew from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from recovery.commit import CommitParent
from storage.files import append_durably, make_folder
from vime.errors import RestoreError, reason_of


class Branch(msgspec.Struct, frozen=True):
    """One session of a run."""

    branch: str
    parent: CommitParent | None
    directory: str
    """Folder of its commits, relative to the run folder."""
    start_version: int
    """Policy version before its first publication."""


def branches_path(run: Path) -> Path:
    return run / "rollout" / "branches.jsonl"


def append_branch(run: Path, branch: Branch) -> None:
    """Record that a session has begun, durably."""
    make_folder(branches_path(run).parent)
    append_durably(branches_path(run), msgspec.json.encode(branch))


def read_branches(run: Path) -> list[Branch]:
    """Branches of a run in the order they began; a torn last line is left out.

    Raises:
        RestoreError: the file can't be read, or a line before the last is damaged.
    """
    path = branches_path(run)
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RestoreError(f"{path} can't be read: {reason_of(error)}.", next_step="Restore the file.") from error
    result = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            result.append(msgspec.json.decode(line, type=Branch))
        except msgspec.MsgspecError as error:
            if number >= len(lines) - 1:
                continue
            raise RestoreError(f"{path}:{number}: damaged ({error}).", next_step="Restore the file.") from error
    return result


def ancestry(branches: Sequence[Branch], tip: str) -> list[tuple[str, int | None]]:
    """The branches that lead to `tip`, oldest first, each with the last rollout that counts (None: all of them).

    Raises:
        RestoreError: `tip` or one of its ancestors is unknown.
    """
    known = {branch.branch: branch for branch in branches}
    chain: list[tuple[str, int | None]] = []
    name, last = tip, None
    while True:
        if name not in known:
            raise RestoreError(
                f"branch {name} is not in {len(known)} known branches of this run.",
                next_step="`vime queue history RUN` lists them.",
            )
        chain.append((name, last))
        parent = known[name].parent
        if parent is None:
            return chain[::-1]
        # A commit of a grandparent counts no further than the commit that the parent grew from.
        name, last = parent.branch, parent.rollout_id
