"""A campaign's sessions, with a job in small in place of vime."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.chaos.kills import Kill, Layout, Victim
from benchmarks.chaos.processes import MarkedProcesses
from benchmarks.chaos.session import Campaign, Patience
from tests.end_to_end.jobs import Job
from vime.utils.kill_points import KillPoint

ONE, TWO = Layout(1, 1), Layout(2, 1)
TRAINER = Kill(0, ONE, victim=Victim.TRAINER)
AT_COMMIT = Kill(1, ONE, point=KillPoint.BEFORE_COMMIT)


@dataclass
class SmallJob(Job):
    how: str = "well"

    def standin_command(self) -> list[str]:
        return [sys.executable, "-m", "tests.benchmarks.kill_rehearsal", str(self.run), self.how]


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[Campaign]:
    campaign = Campaign(tmp_path, standin=True, patience=Patience(start=60.0, survive=20.0, stop=20.0, orphan=0.5))
    campaign.job = SmallJob(tmp_path)
    yield campaign
    campaign.close()


def test_a_session_that_survives_takes_the_next_kill_and_one_that_ends_is_followed_by_another(
    campaign: Campaign,
) -> None:
    survived = campaign.run(TRAINER, 100)
    assert (survived.killed, survived.how) == (True, "went on (1 ranks, 1 engines, 1 producers, 0000.log)")
    ended = campaign.run(AT_COMMIT, 100)
    assert (ended.killed, ended.how) == (True, "ended, status -9 (1 ranks, 1 engines, 1 producers, 0000.log)")
    other = campaign.run(Kill(2, TWO, victim=Victim.DRIVER), 100)
    assert (other.killed, other.how) == (True, "ended, status -9 (2 ranks, 1 engines, 1 producers, 0001.log)")
    assert [outcome.stuck for outcome in (survived, ended, other)] == [False] * 3
    assert survived.orphans + ended.orphans + other.orphans == []


def test_a_kill_that_wants_a_new_session_has_the_one_that_runs_stop_in_order(campaign: Campaign) -> None:
    campaign.run(TRAINER, 100)
    tree = campaign.run(Kill(1, TWO, victim=Victim.TREE, from_start=True, new_session=True), 100)
    assert tree.seconds["stop"] > 0
    assert tree.how == "stopped with status 0; then ended, status -9 (2 ranks, 1 engines, 1 producers, 0001.log)"
    assert not tree.stuck


def test_a_session_that_stands_still_after_a_kill_is_stuck_and_ended(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, standin=True, patience=Patience(start=60.0, survive=1.0))
    campaign.job = SmallJob(tmp_path, how="frozen")
    outcome = campaign.run(TRAINER, 100)
    assert (outcome.killed, outcome.stuck) == (True, True)
    assert outcome.how.startswith("no step and no end in 1 s")
    assert campaign.job.run.exists()


def test_a_session_that_ends_unkilled_is_stuck(campaign: Campaign) -> None:
    campaign.job = SmallJob(campaign.folder, how="short")
    outcome = campaign.run(TRAINER, 100)
    assert (outcome.killed, outcome.stuck, outcome.how) == (
        False,
        True,
        "ended before its moment, status 3 (1 ranks, 1 engines, 1 producers, 0000.log)",
    )


def test_a_process_that_is_left_over_is_told_and_ended(campaign: Campaign) -> None:
    campaign.job = SmallJob(campaign.folder, how="orphan")
    (orphan,) = campaign.run(Kill(0, ONE, victim=Victim.DRIVER), 100).orphans[:1]
    assert "sleep" in orphan


def test_what_an_interrupted_campaign_left_running_is_ended_before_the_next_kill(tmp_path: Path) -> None:
    first = Campaign(tmp_path, standin=True)
    first.job = SmallJob(tmp_path)
    assert first.run(TRAINER, 100).how.startswith("went on")
    (tmp_path / "prompts.jsonl").touch()
    second = Campaign(tmp_path, standin=True)
    second.prepare()
    steps = second.num_steps()
    assert MarkedProcesses(str(tmp_path)).alive() == []
    first.close()
    assert second.num_steps() == steps
