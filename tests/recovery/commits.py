"""Commits of a run, as a session writes them, with a checkpoint of a few bytes."""

from __future__ import annotations

from pathlib import Path

from recovery.commit import CommitParent, QueueState, iteration_directory, write_commit

WEIGHT_VERSION = 4


def checkpoint(folder: Path, rollout_id: int) -> None:
    """What the trainer's ranks leave for a commit."""
    written = iteration_directory(folder, rollout_id)
    written.mkdir(parents=True)
    (written / "model.distcp").write_bytes(bytes(range(200)))
    (written / "metadata.json").write_text("{}")


def seal(
    folder: Path, rollout_id: int, state: QueueState, *, branch: str = "a", parent: CommitParent | None = None
) -> Path:
    """Make a commit of a checkpoint that is there; its record."""
    return write_commit(
        folder,
        rollout_id=rollout_id,
        branch=branch,
        parent=parent,
        weight_version=WEIGHT_VERSION,
        run_id="rollout",
        rollout_data_dir="data",
        queue_state=state,
    )


def commit(
    folder: Path, rollout_id: int, state: QueueState, *, branch: str = "a", parent: CommitParent | None = None
) -> Path:
    """A checkpoint and its commit; the record."""
    checkpoint(folder, rollout_id)
    return seal(folder, rollout_id, state, branch=branch, parent=parent)
