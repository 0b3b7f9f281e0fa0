"""Commits of a session: whole or absent, at once or in the background, one after the other."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.commits import Commits
from pipeline.run_folder import RunFolder
from pipeline.session_start import Start
from recovery.commit import QueueState, committed_rollouts, iteration_directory, write_commit
from recovery.pointer import read_tracker
from recovery.restore import RestoreMode, RestorePlan
from storage.positions import PositionRanges
from vime.settings.parse import parse_settings

START = Start(RestorePlan(RestoreMode.NEW, ".", 0), "a", None, None, None)


class Rank:
    """A rank whose files are written when the test says so."""

    def __init__(self, number: int, calls: list[str]) -> None:
        self.number, self.calls = number, calls
        self.written = asyncio.Event()
        self.error: Exception | None = None
        for name in ("save", "begin_save", "save_written", "finish_save"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    def _note(self, what: str) -> None:
        self.calls.append(f"{what} {self.number}")

    def _write(self, directory: str, rollout_id: int) -> None:
        folder = iteration_directory(Path(directory), rollout_id)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank_{self.number}").write_bytes(b"weights")

    async def _save(self, directory: str, rollout_id: int) -> None:
        if self.error is not None:
            raise self.error
        self._write(directory, rollout_id)

    async def _begin_save(self, directory: str, rollout_id: int) -> None:
        self._note(f"copy {rollout_id}")
        self._write(directory, rollout_id)

    async def _save_written(self) -> None:
        await self.written.wait()
        if self.error is not None:
            raise self.error

    async def _finish_save(self) -> None:
        self._note("finish")


class Ranks:
    """What `Commits` needs of the run's processes."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.queue = self
        self.ranks = [Rank(number, self.calls) for number in range(2)]
        self.trained = 0
        self.rotated: list[QueueState] = []
        self.released: list[PositionRanges] = []

    async def on_trainers(self, call: Any) -> list[Any]:
        return list(await asyncio.gather(*(call(rank) for rank in self.ranks)))

    async def save_prompt_source(self, rollout_id: int) -> None:
        self.calls.append(f"source {rollout_id}")

    async def state(self) -> QueueState:
        return QueueState([(0, self.trained)], self.trained + 1, {})

    async def rotate(self, state: QueueState, released: PositionRanges) -> None:
        self.released.append(released)
        self.rotated.append(state)

    def let_write(self) -> None:
        for rank in self.ranks:
            rank.written.set()


class Session:
    def __init__(self, run: Path, *words: str) -> None:
        settings = parse_settings(["--save", str(run), *words])
        self.ranks, self.run = Ranks(), run
        self.notes: list[str] = []
        self.commits = Commits(settings, RunFolder.of(settings), START, self.ranks, self.notes.append)  # type: ignore[arg-type]

    async def commit(self, rollout_id: int) -> None:
        await self.commits.commit(START, rollout_id, rollout_id + 1)

    @property
    def on_disk(self) -> list[int]:
        return committed_rollouts(self.run)

    def said(self, words: str) -> bool:
        return any(words in note for note in self.notes)


@pytest.mark.parametrize(
    ("flags", "kept"), [((), [0, 1, 2]), (("--rollout-queue-online-gc", "--rollout-queue-keep-commits", "2"), [2])]
)
async def test_what_the_trainer_made_of_tokens_is_kept_as_long_as_the_samples(
    tmp_path: Path, flags: tuple[str, ...], kept: list[int]
) -> None:
    session = Session(tmp_path, *flags)
    for rollout in range(3):
        (tmp_path / "token_log" / str(rollout)).mkdir(parents=True)
        session.ranks.trained = rollout
        await session.commit(rollout)
    assert sorted(int(path.name) for path in (tmp_path / "token_log").iterdir()) == kept
    assert session.ranks.released[-1] == PositionRanges([(0, 1)] if flags else [])


async def test_a_commit_is_on_disk_when_it_returns_and_the_tracker_names_it(tmp_path: Path) -> None:
    session = Session(tmp_path)
    await session.commit(0)
    assert session.on_disk == [0]
    assert session.commits.newest == (tmp_path, 0)
    assert (read_tracker(tmp_path).text, read_tracker(tmp_path).recorded) == ("0", "0")


async def test_one_rank_that_can_not_write_leaves_no_commit(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.ranks.ranks[1].error = RuntimeError("disk")
    with pytest.raises(RuntimeError, match="disk"):
        await session.commit(0)
    assert (session.on_disk, session.commits.newest) == ([], None)
    assert not session.said("Committed")


async def test_a_commit_in_the_background_is_said_and_counted_only_when_it_is_on_disk(tmp_path: Path) -> None:
    session = Session(tmp_path, "--async-save")
    await session.commit(0)
    session.ranks.trained = 7
    assert session.said("Copied rollout 0")
    assert (session.on_disk, session.commits.newest, session.said("Committed")) == ([], None, False)
    session.ranks.let_write()
    await session.commits.settle()
    assert (session.on_disk, session.commits.newest) == ([0], (tmp_path, 0))
    assert session.said("Committed rollout 0")
    assert session.ranks.rotated[0].trained == [(0, 0)], "the queue as it was when the weights were copied"


async def test_the_next_commit_waits_for_the_one_before(tmp_path: Path) -> None:
    session = Session(tmp_path, "--async-save")
    await session.commit(0)
    later = asyncio.create_task(session.commit(1))
    await asyncio.sleep(0)
    assert "copy 1 0" not in session.ranks.calls
    session.ranks.let_write()
    await later
    assert session.on_disk == [0]
    await session.commits.settle()
    assert session.on_disk == [0, 1]
    assert session.ranks.calls.index("finish 0") < session.ranks.calls.index("copy 1 0")


async def test_ranks_that_work_together_are_not_asked_to_finish_a_save_meanwhile(tmp_path: Path) -> None:
    session = Session(tmp_path, "--async-save")
    await session.commit(0)
    async with session.commits.trainers_busy:
        session.ranks.let_write()
        for _ in range(20):
            await asyncio.sleep(0)
        assert "finish 0" not in session.ranks.calls
    await session.commits.settle()
    assert session.on_disk == [0]


async def test_a_failure_in_the_background_is_raised_at_the_next_look_and_leaves_no_commit(tmp_path: Path) -> None:
    session = Session(tmp_path, "--async-save")
    await session.commit(0)
    session.commits.check()
    session.ranks.ranks[0].error = RuntimeError("disk")
    session.ranks.let_write()
    with pytest.raises(RuntimeError, match="disk"):
        await session.commits.settle()
    with pytest.raises(RuntimeError, match="disk"):
        session.commits.check()
    assert session.on_disk == []


async def test_a_commit_that_is_given_up_never_becomes_one(tmp_path: Path) -> None:
    session = Session(tmp_path, "--async-save")
    await session.commit(0)
    await session.commits.abandon()
    session.ranks.let_write()
    await session.commits.settle()
    assert session.on_disk == []


async def test_a_record_that_is_being_written_is_waited_for_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_write = threading.Event(), threading.Event()

    def slowly(*given: Any, **options: Any) -> Path:
        begun.set()
        may_write.wait()
        return write_commit(*given, **options)

    monkeypatch.setattr("pipeline.commits.write_commit", slowly)
    session = Session(tmp_path)
    commit = asyncio.create_task(session.commit(0))
    await asyncio.to_thread(begun.wait)
    commit.cancel()
    await asyncio.gather(commit, return_exceptions=True)
    assert (session.on_disk, session.commits.newest) == ([], None)
    asyncio.get_running_loop().call_later(0.05, may_write.set)
    await session.commits.abandon()
    assert (session.on_disk, session.commits.newest) == ([0], (tmp_path, 0))


async def test_old_commits_are_removed_after_a_new_one(tmp_path: Path) -> None:
    session = Session(tmp_path, "--keep-checkpoints", "2", "--keep-every", "4")
    for rollout in range(7):
        await session.commit(rollout)
    assert session.on_disk == [3, 5, 6]
    assert session.said("Removed the checkpoint of")
