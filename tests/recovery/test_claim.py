"""A run goes on only with its own queue; a queue is never taken over by another run."""

import shutil
from pathlib import Path

import pytest

from recovery.claim import claim_queue, queue_claim_path, run_claim_path
from storage.pool import Pool
from storage.queue import GroupQueue
from vime.errors import RestoreError


def start(run: Path, queue: Path, *, has_commits: bool = False) -> None:
    """What the start of a session does with the two folders."""
    (run / "rollout").mkdir(parents=True, exist_ok=True)
    claim_queue(run, queue, has_commits=has_commits)
    if not (queue / "vime" / "pool.json").exists():
        with Pool.create(queue, "rollout") as pool, GroupQueue.open(pool, owner="test", lease_seconds=60):
            pass


def test_a_run_goes_on_with_its_own_queue_also_where_both_were_moved(tmp_path: Path) -> None:
    start(tmp_path / "run", tmp_path / "run" / "pool")
    start(tmp_path / "run", tmp_path / "run" / "pool", has_commits=True)
    (tmp_path / "run").rename(tmp_path / "moved")
    start(tmp_path / "moved", tmp_path / "moved" / "pool", has_commits=True)


def test_the_queue_of_another_run_is_never_taken_over(tmp_path: Path) -> None:
    start(tmp_path / "one", tmp_path / "queue")
    with pytest.raises(RestoreError, match=f"belongs to the run in {tmp_path / 'one'}"):
        start(tmp_path / "two", tmp_path / "queue")
    start(tmp_path / "one", tmp_path / "queue")


def test_commits_are_not_resumed_on_an_empty_queue(tmp_path: Path) -> None:
    start(tmp_path / "run", tmp_path / "queue")
    with pytest.raises(RestoreError, match=f"it was in {tmp_path / 'queue'}") as caught:
        start(tmp_path / "run", tmp_path / "forgotten", has_commits=True)
    assert "--rollout-data-dir that the run was started with" in caught.value.next_step


def test_a_run_without_commits_may_begin_anew_elsewhere_and_never_returns(tmp_path: Path) -> None:
    start(tmp_path / "run", tmp_path / "first")
    start(tmp_path / "run", tmp_path / "second")
    with pytest.raises(RestoreError, match="not to the one in"):
        start(tmp_path / "run", tmp_path / "first", has_commits=True)


def test_a_start_that_was_cut_off_between_the_two_files_is_repeated(tmp_path: Path) -> None:
    start(tmp_path / "run", tmp_path / "queue")
    queue_claim_path(tmp_path / "queue").unlink()
    (tmp_path / "queue" / "vime" / "queue.json").unlink()
    start(tmp_path / "run", tmp_path / "queue")


def test_a_damaged_claim_is_refused_by_name(tmp_path: Path) -> None:
    start(tmp_path / "run", tmp_path / "queue")
    run_claim_path(tmp_path / "run").write_text("{")
    with pytest.raises(RestoreError, match=r"rollout/queue\.json: damaged"):
        start(tmp_path / "run", tmp_path / "queue")


def test_a_copy_of_a_run_does_not_go_on_with_the_queue_of_the_original(tmp_path: Path) -> None:
    start(tmp_path / "run", tmp_path / "queue")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(RestoreError, match=f"is a copy of the run in {tmp_path / 'run'}"):
        start(tmp_path / "copy", tmp_path / "queue", has_commits=True)
    start(tmp_path / "run", tmp_path / "queue", has_commits=True)
    shutil.rmtree(tmp_path / "run")
    start(tmp_path / "copy", tmp_path / "queue", has_commits=True)
