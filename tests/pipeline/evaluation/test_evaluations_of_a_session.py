"""The driver's side: evaluations go on beside training, hold publications up for a while, and are written down."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.evaluation.records import DataSetResult, EvaluationRecord, read_evaluations
from pipeline.evaluation.schedule import EvaluationSchedule
from pipeline.evaluation.session import Evaluations
from pipeline.progress import ProgressView
from pipeline.run_folder import RunFolder
from vime.errors import StorageError, TooManyFailuresError


class Producers:
    """Answers that come when a test says so."""

    def __init__(self) -> None:
        self.generated, self.scored = asyncio.Event(), asyncio.Event()
        self.failed: dict[str, int] = {}
        self.error: Exception | None = None

    async def evaluate(self, step: int, branch: str) -> EvaluationRecord:
        await self.scored.wait()
        if self.error is not None:
            raise self.error
        return EvaluationRecord(
            evaluation=step, branch=branch, time_s=0.0, generate_s=0.0, seconds=0.0, policy_version=1,
            policy_versions=[1], metrics={"eval/a": 0.5, "eval/a-truncated_ratio": 0.0},
            data_sets=[DataSetResult("a", 2, 2, self.failed, 1, [1])],
        )  # fmt: skip

    async def evaluation_generated(self, step: int, branch: str) -> None:  # noqa: ARG002
        await self.generated.wait()


class Session:
    """Evaluations with everything that they are given."""

    def __init__(self, folder: Path, *, num_rollout: int = 5, publication_wait_s: float = 30.0) -> None:
        self.producers, self.said = Producers(), io.StringIO()
        self.folder = RunFolder(folder, folder / "pool")
        schedule = EvaluationSchedule(1, num_rollout, before_training=True)
        view = ProgressView(Console(file=self.said, width=200))
        self.copied: list[EvaluationRecord] = []
        self.evaluations = Evaluations(
            self.producers,
            self.folder,
            view,
            schedule,
            copy=self.copied.append,
            branch="b",
            publication_wait_s=publication_wait_s,
            stop_asked=lambda: self.stop_asked,
        )
        self.stop_asked = False

    def written(self) -> list[int]:
        path = self.folder.metrics
        return [record.evaluation for record in read_evaluations(path.read_bytes())] if path.exists() else []


async def begun(session: Session, step: int = 1) -> None:
    session.evaluations.begin(step)
    await asyncio.sleep(0)


async def is_held(waiting: asyncio.Task[None]) -> bool:
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    return not done


async def test_a_publication_waits_for_responses_and_not_for_rewards(tmp_path: Path) -> None:
    session = Session(tmp_path)
    await begun(session)
    publication = asyncio.create_task(session.evaluations.responses_are_there())
    assert await is_held(publication)
    assert session.evaluations.hold_versions
    session.producers.generated.set()
    await asyncio.wait_for(publication, 5)
    assert not session.evaluations.hold_versions
    assert session.written() == []
    session.producers.scored.set()
    await session.evaluations.finish()
    assert session.written() == [1]
    assert "Evaluation after step 1 (policy version 1)" in session.said.getvalue()


async def test_a_publication_waits_for_every_evaluation_also_where_others_collect_one_meanwhile(tmp_path: Path) -> None:
    session = Session(tmp_path)
    first = session.producers.scored
    await begun(session, 1)
    session.producers.scored = asyncio.Event()
    await begun(session, 2)
    publication = asyncio.create_task(session.evaluations.responses_are_there())
    assert await is_held(publication)
    session.evaluations._running[0].task.add_done_callback(lambda _: session.evaluations.collect())
    first.set()
    assert await is_held(publication)
    assert session.written() == [1]
    session.producers.scored.set()
    await asyncio.wait_for(publication, 5)


async def test_no_publication_waits_longer_than_it_may(tmp_path: Path) -> None:
    session = Session(tmp_path, publication_wait_s=0.05)
    await begun(session)
    await asyncio.wait_for(session.evaluations.responses_are_there(), 5)
    assert session.evaluations.are_going_on
    assert not session.evaluations.hold_versions


async def test_a_result_that_can_not_be_written_is_told_and_ends_nothing(tmp_path: Path) -> None:
    session = Session(tmp_path / "gone")
    session.producers.scored.set()
    await begun(session)
    await session.evaluations.finish()
    said = session.said.getvalue()
    assert "warning: the evaluation after step 1 was not kept: " in said
    assert "Evaluation after step 1 (policy version 1)" in said


async def test_a_result_is_written_as_soon_as_it_is_there(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.producers.scored.set()
    await begun(session)
    await asyncio.sleep(0.01)
    session.evaluations.collect()
    assert (session.written(), session.evaluations.are_going_on) == ([1], False)
    assert [record.evaluation for record in session.copied] == [1]


async def test_what_ends_an_evaluation_ends_the_run(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.producers.error = StorageError("the disk is gone")
    session.producers.scored.set()
    await begun(session)
    with pytest.raises(StorageError, match="the disk is gone"):
        await session.evaluations.finish()


async def test_a_user_who_stops_waits_for_no_evaluation(tmp_path: Path) -> None:
    session = Session(tmp_path)
    await begun(session)
    session.stop_asked = True
    await asyncio.wait_for(session.evaluations.responses_are_there(), 5)
    await asyncio.wait_for(session.evaluations.finish(), 5)
    assert "The evaluation after step 1 was not finished." in session.said.getvalue()


async def test_a_training_run_survives_an_evaluation_without_a_result_and_a_run_of_evaluation_does_not(
    tmp_path: Path,
) -> None:
    for num_rollout in (5, 0):
        session = Session(tmp_path / str(num_rollout), num_rollout=num_rollout)
        session.folder.make()
        session.producers.failed = {"reward_timeout": 2}
        session.producers.scored.set()
        await begun(session, num_rollout)
        if num_rollout:
            await session.evaluations.finish()
        else:
            with pytest.raises(TooManyFailuresError, match=r"no result: a: 2 failed \(reward_timeout\)"):
                await session.evaluations.finish()
        assert session.written() == [num_rollout]
