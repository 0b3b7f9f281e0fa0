"""The campaign of kills: its plan, its checks, and a short one against a real job with stand-in engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos.__main__ import main
from benchmarks.chaos.campaign_log import CampaignLog, KillRecord
from benchmarks.chaos.kills import ANEW_SHARE, POINT_SHARE, Kill, Layout, Victim, plan_kill
from benchmarks.chaos.session import Outcome
from benchmarks.chaos.step_log import StepLog, steps_of
from benchmarks.chaos.verdict import Verdict, judge
from tests.end_to_end.jobs import REPOSITORY, Job
from tests.support.eventful_run import make_run
from vime.errors import SettingsError
from vime.utils.kill_points import KILL_FILE_VARIABLE, KillPoint

PROMPTS = [f"p{number}" for number in range(30)]
LAYOUTS = [Layout(1, 1), Layout(2, 2, 2)]
SOUND = dict.fromkeys(("lost", "trained_twice", "skipped_prompts", "version_regressions", "orphans", "stuck"), 0)


def test_a_kill_is_a_function_of_its_seed_and_number() -> None:
    assert plan_kill(3, 7, LAYOUTS) == plan_kill(3, 7, LAYOUTS)
    assert len({plan_kill(3, number, LAYOUTS) for number in range(50)}) == 50
    assert plan_kill(3, 7, LAYOUTS) != plan_kill(4, 7, LAYOUTS)


def test_a_long_campaign_has_every_point_every_victim_and_every_layout() -> None:
    kills = [plan_kill(0, number, LAYOUTS) for number in range(500)]
    at_points = [kill for kill in kills if kill.point is not None]
    assert len(at_points) == pytest.approx(500 * POINT_SHARE, rel=0.2)
    assert {kill.point for kill in at_points} == set(KillPoint)
    assert {kill.victim for kill in kills if kill.point is None} == set(Victim)
    assert {kill.layout for kill in kills} == set(LAYOUTS)
    assert sum(kill.anew for kill in kills) == pytest.approx(500 * ANEW_SHARE, rel=0.5)
    assert {kill.anew for kill in kills if kill.from_start} == {False, True}


def test_what_is_killed_before_the_first_step_runs_by_then() -> None:
    early = [kill for number in range(500) if (kill := plan_kill(0, number, LAYOUTS)).from_start]
    assert {kill.victim for kill in early} == {Victim.DRIVER, Victim.TREE}


@pytest.mark.parametrize(("asked", "status"), [("before-save", -signal.SIGKILL), ("after-save", 0), (None, 0)])
def test_only_the_process_that_gets_to_the_point_asked_for_is_killed(
    tmp_path: Path, asked: str | None, status: int
) -> None:
    if asked is not None:
        (tmp_path / "kill").write_text(asked)
    code = "from vime.utils.kill_points import KillPoint, reach; reach(KillPoint.BEFORE_SAVE)"
    environment = {**os.environ, KILL_FILE_VARIABLE: str(tmp_path / "kill")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == status
    assert (tmp_path / "kill").exists() == (asked == "after-save"), "one kill is asked for, and one process takes it"


def test_every_point_is_on_the_way_of_a_run() -> None:
    sources = "".join(
        path.read_text() for package in ("pipeline", "recovery") for path in (REPOSITORY / package).rglob("*.py")
    )
    assert [point.name for point in KillPoint if f"reach(KillPoint.{point.name})" not in sources] == []


def test_the_verdict_tells_what_is_lost_twice_skipped_and_gone_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", monkeypatch)
    metrics = run / "metrics.jsonl"
    metrics.write_text('{"rollout_id": 0, "policy_version": 2}\n{"rollout_id": 1, "policy_version": 2}\n{"roll')
    sound = judge(run, set(), PROMPTS)
    assert (sound.lost, sound.trained_twice, sound.skipped_prompts, sound.version_regressions) == ([], [], [], [])
    with metrics.open("a") as file:
        file.write('\n{"rollout_id": 2, "policy_version": 1}\n')
    log = next((run / "training_log").glob("rank_*.jsonl"))
    entry = json.loads(log.read_text().splitlines()[-1])
    log.write_text(log.read_text() + json.dumps({**entry, "step": 7}) + "\n")
    verdict = judge(run, set(), PROMPTS)
    assert verdict.version_regressions == ["rollout 2: version 1 after 2"]
    assert len(verdict.trained_twice) == len(entry["sample_indices"])


def test_a_torn_line_is_no_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"policy_version": 1, "rollout_id": 0}\n{"evaluation": 1}\n{"policy_ver')
    assert [step["rollout_id"] for step in steps_of(tmp_path)] == [0]


def test_steps_are_counted_once_however_often_the_log_is_read(tmp_path: Path) -> None:
    log, path = StepLog(tmp_path), tmp_path / "metrics.jsonl"
    assert (log.count(), log.last_rollout) == (0, -1)
    path.write_text('{"policy_version": 1, "rollout_id": 4}\n{"policy_version": 2, ')
    assert (log.count(), log.count()) == (1, 1)
    with path.open("a") as file:
        file.write('"rollout_id": 3}\n{"evaluation": 1}\n')
    assert (log.count(), log.last_rollout) == (2, 4)


class FakeCampaign:
    """Kills nothing; of kill 2 the session had ended, once."""

    interrupted_at = -1

    def __init__(self, folder: Path, **_options: bool) -> None:
        self.job = Job(folder)
        self.made: list[int] = []

    def prepare(self) -> None:
        self.job.folder.mkdir(exist_ok=True)
        (self.job.folder / "prompts.jsonl").write_text('{"input": "x"}\n')

    def run(self, kill: Kill, _num_rollout: int) -> Outcome:
        if kill.number == self.interrupted_at:
            raise KeyboardInterrupt
        self.made.append(kill.number)
        killed = kill.number != 2 or self.made.count(2) == 2
        return Outcome(killed, "went on", orphans=["1 sleep"] if kill.number == 1 else [], seconds={"wait": 2.0})

    def settle_down(self) -> None: ...

    def last_rollout(self) -> int:
        return 0

    def finish(self, _num_rollout: int, _layout: Layout) -> Outcome:
        return Outcome(False, "status 0", seconds={"finish": 6.0})

    def close(self) -> None: ...


def test_an_interrupted_campaign_goes_on_from_its_folder_and_reports_on_all_its_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.chaos.__main__.Campaign", FakeCampaign)
    monkeypatch.setattr("benchmarks.chaos.__main__.judge", lambda *_: Verdict())
    words = ["--json", "--kills", "5", "--folder", str(tmp_path)]
    monkeypatch.setattr(FakeCampaign, "interrupted_at", 3)
    with pytest.raises(KeyboardInterrupt):
        main(words)
    monkeypatch.setattr(FakeCampaign, "interrupted_at", -1)
    assert main(words) == 1
    printed = capsys.readouterr()
    values = {name: value["median"] for name, value in json.loads(printed.out)["values"].items()}
    assert (values["kills"], values["orphans"], values["lost"], values["stuck"]) == (5, 1, 0, 0)
    assert values["seconds_a_kill"] == pytest.approx((6 * 2.0 + 6.0) / 5)
    made = [record.number for record in CampaignLog(tmp_path / "kills.jsonl", seed=0, real_engine=False).records()]
    assert made == [0, 1, 2, 2, 3, 4, -1]


def test_a_folder_of_another_seed_is_refused_and_a_torn_line_is_no_kill(tmp_path: Path) -> None:
    path = tmp_path / "kills.jsonl"
    log = CampaignLog(path, seed=1, real_engine=False)
    log.append(KillRecord(7, "kill 7", True, "went on", False, [], {}))
    with path.open("a") as file:
        file.write('{"number": 8, "kil')
    assert log.done() == {7}
    with pytest.raises(SettingsError, match="Give another --folder"):
        CampaignLog(path, seed=2, real_engine=False)


def test_later_kills_need_the_folder_of_the_earlier_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--from", "4"])
    assert "--from needs the --folder" in capsys.readouterr().err


@pytest.mark.multiproc
@pytest.mark.timeout(1800)
def test_four_kills_lose_nothing_and_train_nothing_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--json", "--kills", "4", "--seed", "18148", "--folder", str(tmp_path / "chaos")])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    values = {name: value["median"] for name, value in json.loads(printed.out)["values"].items()}
    assert values["kills"] == 4, printed.err
    assert {name: value for name, value in values.items() if not name.startswith(("kills", "seconds"))} == SOUND


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(3600)
def test_forty_kills_lose_nothing_and_train_nothing_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--json", "--kills", "40", "--seed", "2", "--folder", str(tmp_path / "chaos")])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert json.loads(printed.out)["values"]["kills"]["median"] >= 35, printed.err
