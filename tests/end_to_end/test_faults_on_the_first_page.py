"""Whole jobs with a planted fault: the first page of `vime view` names it. Engines are stand-ins."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from plotly.utils import PlotlyJSONEncoder

from recovery.run_location import locate_run
from tests.end_to_end import rewards
from tests.end_to_end.jobs import Job, ended_with_standins, run_with_standins
from tests.end_to_end.standin_run import DIES_VARIABLE, FORGETS_VARIABLE
from tests.support.tiny_models import build_tiny_qwen3
from vime.view.pages.overview import overview
from vime.view.run_watch import read_once

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(400)]

FLAGS = {"--parity-probes": 0, "--custom-rm-path": f"{rewards.__name__}.by_index"}
"""No trainer agrees with a stand-in."""


def first_page(job: Job) -> str:
    return json.dumps(overview(read_once(locate_run(job.run))), cls=PlotlyJSONEncoder)


def test_a_slow_judge(tmp_path: Path) -> None:
    judge = f"{rewards.__name__}.slow"
    job = Job(tmp_path, num_rollout=2, flags=FLAGS | {"--custom-rm-path": judge, "--max-staleness": 0})
    job.prepare()
    output = run_with_standins(job)
    page = first_page(job)
    assert f"of their time in the reward {judge}, and the trainer waited" in page
    assert output.count("alarm: reward: Samples spent ") == 1
    assert "At end still: reward: " in output
    assert [alarm["name"] for alarm in job.steps()[-1]["standing_alarms"]].count("reward") == 1


def test_a_stale_prefix(tmp_path: Path) -> None:
    flags = {"--prefix-cache-salt": "none", "--vllm-max-model-len": 256, "--max-staleness": 0}
    job = Job(tmp_path, num_rollout=3, flags=FLAGS | flags)
    job.prepare()
    lines = [json.dumps({"input": "r" * 140 + f"{n:05d}=", "label": ""}) for n in range(64)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    output = run_with_standins(job)
    assert job.steps()[0]["stale_prefix_share"] == 0.0
    assert job.steps()[-1]["stale_prefix_share"] > 0.5
    page = first_page(job)
    assert "of the prompt tokens came from prefix caches that may hold what older weights computed" in page
    assert "--prefix-cache-salt version" in page
    assert output.count("alarm: prefix: Stale prefixes: ") == 1


def test_routes_that_an_engine_forgets(tmp_path: Path) -> None:
    job = Job(tmp_path, num_rollout=2, flags=FLAGS, switches=("--use-rollout-routing-replay",))
    job.prepare()
    shutil.rmtree(job.model)
    build_tiny_qwen3(job.model, seed=0, num_experts=4, norm_topk_prob=True)
    output = run_with_standins(job, **{FORGETS_VARIABLE: "8"})
    assert {step["train"]["routing_replay_fraction"] for step in job.steps()} == {1.0}, "such samples aren't trained"
    assert job.steps()[-1]["failed_samples"].keys() == {"routes_missing"}
    page = first_page(job)
    assert " routes_missing; alarm above 1% of the " in page
    assert "routes of 0 tokens came, allowed: " in page
    assert output.count("alarm: failures: Failed samples: ") >= 1


def test_a_dead_engine(tmp_path: Path) -> None:
    job = Job(tmp_path, num_rollout=400, flags=FLAGS)
    job.prepare()
    done = ended_with_standins(job, **{DIES_VARIABLE: "2"})
    assert done.returncode == 4, done.stdout + done.stderr
    page = first_page(job)
    assert "engine_0 ended unexpectedly" in page
    assert "logs/engine_0.log" in page
