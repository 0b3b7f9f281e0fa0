"""A run that doesn't go on is told, again and again, and ended; one that goes on is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import msgspec
import pytest

from pipeline import supervision
from pipeline.activity import ProducerActivity
from pipeline.messages import QueueCounts
from pipeline.stages import Stage, StageBoard
from pipeline.stall_chain import RankActivity
from pipeline.supervision import Patience, StallRecord, Supervisor, write_stall
from vime.errors import ProcessDiedError, StalledError


class Run:
    """What processes would say, and a clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tell_s: float = 10, limit_s: float = 100) -> None:
        monkeypatch.setattr(supervision, "ASK_S", 0.05)
        self.now, self.accepted, self.steps = 0.0, 0, 0
        self.hangs, self.dead, self.judge_hangs = False, False, False
        self.told: list[StallRecord] = []
        self.board = StageBoard()
        self.board.begin(Stage("", 1, groups_wanted=8))
        patience = Patience(tell_s, limit_s)
        self.supervisor = Supervisor(self.board, self, patience, self.told.append, clock=lambda: self.now)

    async def look_after(self, seconds: float) -> None:
        self.now += seconds
        await self.supervisor.look()

    async def ask_coordinator(self) -> QueueCounts:
        if self.hangs:
            await asyncio.Event().wait()
        if self.dead:
            raise ProcessDiedError("the queue coordinator died.\nTrace")
        return QueueCounts(9, 0, self.accepted, 1, {}, 3, False)

    def ask_producers(self) -> list[Awaitable[ProducerActivity]]:
        return []

    def ask_ranks(self) -> list[Awaitable[RankActivity]]:
        async def tell() -> RankActivity:
            return RankActivity("", 0, self.steps)

        return [tell()]

    def ask_engines(self) -> dict[str, Awaitable[None]]:
        return {}

    def ask_frozen_engines(self) -> dict[str, Awaitable[None]]:
        async def check() -> None:
            if self.judge_hangs:
                await asyncio.Event().wait()

        return {"http://judge": check()}

    def fenced_engines(self) -> dict[str, str]:
        return {}


async def test_a_stall_is_told_again_and_again_with_growing_times_and_then_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, tell_s=10, limit_s=35)
    await run.look_after(0)
    for _ in range(3):
        await run.look_after(10)
    assert [record.quiet_s for record in run.told] == [10, 20, 30]
    assert run.told[0].words.startswith("step 1 waits for 8 groups <- ")
    with pytest.raises(StalledError, match=r"gone on for 36 s, --stall-timeout is 35: step 1 waits for 8 groups"):
        await run.look_after(6)


async def test_groups_steps_and_stages_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, tell_s=10, limit_s=15)
    await run.look_after(0)
    for _ in range(3):
        run.accepted += 1
        await run.look_after(9)
        run.steps += 1
        await run.look_after(9)
        run.board.begin(Stage("trains", 1))
        await run.look_after(9)
    assert run.told == []


async def test_a_process_that_hangs_or_died_is_named_and_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    await run.look_after(0)
    run.hangs = True
    await run.look_after(6)
    run.hangs, run.dead = False, True
    await run.look_after(6)
    assert "the queue coordinator fails: the queue coordinator died." in run.told[0].words
    run.dead, run.hangs = False, True
    await run.look_after(10)
    assert "the queue coordinator does not answer within 0.05 s" in run.told[1].words
    run.hangs = False
    await run.look_after(10)
    assert [record.quiet_s for record in run.told] == [12, 22, 32]


async def test_an_engine_that_judges_and_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    await run.look_after(0)
    run.judge_hangs = True
    await run.look_after(12)
    assert run.told[0].words.endswith(" <- engine http://judge does not answer within 0.05 s")


async def test_a_stage_with_limits_of_its_own_is_told_and_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, tell_s=10, limit_s=15)
    run.board.begin(Stage("the last evaluation goes on", is_bounded=False))
    await run.look_after(0)
    await run.look_after(500)
    assert [record.quiet_s for record in run.told] == [500]


def test_stalls_are_kept_in_the_run_folder(tmp_path: Path) -> None:
    record = StallRecord(1.0, 120.0, "step 1 waits")
    write_stall(tmp_path / "stalls.jsonl", record)
    write_stall(tmp_path / "stalls.jsonl", record)
    lines = (tmp_path / "stalls.jsonl").read_text().splitlines()
    assert [msgspec.json.decode(line, type=StallRecord) for line in lines] == [record, record]


def test_a_stall_that_can_not_be_kept_is_told_to_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_stall(tmp_path / "gone" / "stalls.jsonl", StallRecord(1.0, 120.0, "step 1 waits"))
    assert "a stall was not kept" in caplog.text
