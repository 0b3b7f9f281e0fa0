"""Whoever opens a run with a fault finds its name on the first page; the files are written as a run writes them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from plotly.utils import PlotlyJSONEncoder

from pipeline.activity import GroupActivity, Phase, ProducerActivity
from pipeline.alarm_log import AlarmLog
from pipeline.incidents import session_incidents
from pipeline.messages import ProducerStats, QueueCounts, TrainReport
from pipeline.planner import BatchPlan
from pipeline.publication import Publication
from pipeline.stages import Stage
from pipeline.stall_chain import RunReport, chain_words
from pipeline.step_metrics import StepClock, step_record
from pipeline.stream_shares import StreamShares
from pipeline.supervision import StallRecord, write_stall
from recovery.run_location import locate_run
from storage.dead_letters import DeadLetterBox, letters_folder
from storage.files import append_durably
from storage.pool import Pool
from storage.route_checks import RouteShape, check_routes
from tests.pipeline.debug.test_dumps import planned
from vime.errors import ProcessDiedError, SampleError
from vime.utils.types import Sample
from vime.view.pages.overview import overview
from vime.view.run_watch import RunState, read_once

COUNTS = QueueCounts(100, 8, 4, 4, {}, 12, False)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> BatchPlan:
    with Pool.create(tmp_path_factory.mktemp("pool") / "pool", "run") as pool:
        return planned(pool)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "rollout").mkdir()
    return tmp_path


def state_of(run: Path) -> RunState:
    return read_once(locate_run(run, needs_queue=False))


def first_page(run: Path) -> str:
    return json.dumps(overview(state_of(run)), cls=PlotlyJSONEncoder)


def alarms_of(run: Path) -> list[str]:
    return [alarm.name for alarm in state_of(run).alarms]


def stats(*, reward_s: float = 0.0, cached: int = 0) -> ProducerStats:
    return ProducerStats(
        0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 1.0,
        cached_prompt_tokens=cached, prompt_tokens=2 * cached, reward_s=reward_s, generating_s=0.1 * reward_s,
    )  # fmt: skip


class Batches:
    """Writes batches to `metrics.jsonl`, in which the trainer waited 9 of 10 seconds."""

    def __init__(self, run: Path, plan: BatchPlan, shares: StreamShares) -> None:
        self._run, self._plan, self._clock, self._log = run, plan, StepClock(shares), AlarmLog(print)
        self._clock.wait_s, self._clock.train_s = 9.0, 1.0

    def add(
        self,
        rollout_id: int,
        made: ProducerStats,
        publication: Publication | None = None,
        reports: Sequence[TrainReport] = (TrainReport({"loss": 0.1}, 1.0, 0.0, 10),),
    ) -> None:
        plan = msgspec.structs.replace(self._plan, rollout_id=rollout_id)
        record = step_record(plan, 20, reports, publication, COUNTS, [made], self._clock, {})
        append_durably(self._run / "metrics.jsonl", msgspec.json.encode(self._log.with_alarms(record)))


def test_a_slow_judge_is_named_while_nothing_goes_on(run: Path) -> None:
    waiting = [GroupActivity(Phase.REWARD, 94.0), GroupActivity(Phase.REWARD, 30.0)]
    producers = [ProducerActivity(waiting, True, "judges.slow")]
    words = chain_words(RunReport(Stage("", 1, groups_wanted=8), COUNTS, producers))
    write_stall(run / "stalls.jsonl", StallRecord(time.time(), 94.0, words))
    assert "2 in reward, oldest 94 s: judges.slow" in first_page(run)
    assert alarms_of(run) == ["stall"]


def test_a_slow_judge_is_named_while_batches_still_come(run: Path, plan: BatchPlan) -> None:
    batches = Batches(run, plan, StreamShares(reward="judges.slow"))
    batches.add(0, stats(reward_s=100.0))
    batches.add(1, stats(reward_s=200.0))
    assert "91% of their time in the reward judges.slow, and the trainer waited 90%" in first_page(run)
    assert "reward" in alarms_of(run)


def test_missing_routes_are_named_where_samples_are_trained_without_them(run: Path, plan: BatchPlan) -> None:
    report = TrainReport({"routing_replay_fraction": 0.75}, 1.0, 0.0, 10, samples_without_routes=[9, 4])
    Batches(run, plan, StreamShares()).add(0, stats(), reports=[report])
    page = first_page(run)
    assert "the experts of 75.0% of the tokens were replayed" in page
    assert "2 samples without routes: 4, 9." in page
    assert "Routes are missing" in page


def test_missing_routes_are_named_where_samples_are_refused_for_them(run: Path, plan: BatchPlan) -> None:
    Batches(run, plan, StreamShares()).add(0, stats())
    sample = Sample(index=7, group_index=3, tokens=[1, 2, 3], response_length=1)
    with pytest.raises(SampleError) as refused:
        check_routes(sample, RouteShape(2, 2, 4))
    box = DeadLetterBox(letters_folder(run), "producer-0")
    for attempt in (1, 2):
        box.put(
            refused.value,
            reason=refused.value.reason,
            group_index=3,
            attempt=attempt,
            samples=[sample],
            prompt_ref=None,
            payload_ref=None,
        )
    page = first_page(run)
    assert "Failed samples: 2 routes_missing" in page
    assert "there are no rollout_routed_experts, which routing replay needs" in page


def test_a_stale_prefix_is_named_with_the_flag_that_allows_it(run: Path, plan: BatchPlan) -> None:
    kept = Publication(2, True, False, wire_bytes=1, density=1.0, prepare_s=0.0, pause_s=0.0, fenced={})
    batches = Batches(run, plan, StreamShares(salts_prefixes=False))
    batches.add(0, stats(cached=100), kept)
    assert "prefix" not in alarms_of(run)
    batches.add(1, stats(cached=300), kept)
    page = first_page(run)
    assert "Stale prefixes: 25% of the prompt tokens" in page, "the mean of the last batches"
    assert "--prefix-cache-salt version" in page


def test_a_dead_engine_is_named_with_its_log_until_it_serves_again(run: Path) -> None:
    why = "Its process ended with status -9."
    with session_incidents(run / "incidents.jsonl") as incidents:
        incidents.engines("actor", {"http://127.0.0.1:4711": why}, {"http://127.0.0.1:4711": "engine 0"})
        page = first_page(run)
        assert f"Engine 0 (http://127.0.0.1:4711) gets no requests: {why}" in page
        assert "logs/engine_0.log" in page
        incidents.engines("actor", {}, {})
        assert alarms_of(run) == []


def test_an_engine_whose_death_ended_the_run_is_named_until_the_run_goes_on(run: Path) -> None:
    with pytest.raises(ProcessDiedError), session_incidents(run / "incidents.jsonl"):
        raise ProcessDiedError("engine_0 ended unexpectedly (exit status 9).\nLast lines of logs/engine_0.log:\n | no")
    assert "engine_0 ended unexpectedly (exit status 9)" in first_page(run)
    assert alarms_of(run) == ["ended"]
    with session_incidents(run / "incidents.jsonl"):
        assert alarms_of(run) == []
