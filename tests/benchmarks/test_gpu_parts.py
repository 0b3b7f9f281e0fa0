"""Parts of the suite for GPUs: what they start, how they kill it, and what they make of its records."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import (
    correct,
    crash,
    layouts,
    learner,
    learning,
    publication,
    queue_load,
    reverse_run,
    sample_path,
    smokes,
    stream,
)
from benchmarks.gpu.answers import SpanningAnswer, k3_gap, max_gap, mean_gap
from benchmarks.gpu.engines import SMALL_MOE
from benchmarks.gpu.jobs import Job, without_folder
from benchmarks.gpu.part import Stages
from benchmarks.gpu.reverse_job import reverse_command
from benchmarks.gpu.update_gaps import around
from tests.benchmarks.slow_parts import slow_part
from vime.errors import RunFailedError
from vime.settings.resolve import resolve
from vime.settings.validate import validate

WRITES_STEPS = """
import json, sys, time
from pathlib import Path
path = Path(sys.argv[1]) / "metrics.jsonl"
path.parent.mkdir(exist_ok=True)
first = len(path.read_text().splitlines()) if path.exists() else 0
print("Engine 0 against the trainer on 24 tokens: mean 0.0031, p99 0.02, max 0.03.", flush=True)
for step in range(first, int(sys.argv[2])):
    with path.open("a") as file:
        file.write(json.dumps({"rollout_id": step, "policy_version": step}) + chr(10))
    time.sleep(0.01 if first else 0.2)
"""


def job(folder: Path, steps: int) -> Job:
    return Job([sys.executable, "-c", WRITES_STEPS, str(folder / "run"), str(steps)], folder / "run", folder / "log")


def record(step_s: float, train_s: float, tokens: float, **more: float) -> dict[str, Any]:
    """A step that trained so many tokens."""
    times = {"wait_s": 0.0, "publish_s": 0.1, "publication_s": 0.1, "pause_s": 0.05} | more
    return {"step_s": step_s, "train_s": train_s, "trained_tokens_per_s": tokens / step_s, **times}


@pytest.mark.parametrize("num_gpus", [0, 1, 2])
def test_jobs_are_valid_on_every_kind_of_machine(tmp_path: Path, num_gpus: int) -> None:
    stream.prepare(tmp_path, stream.SMALL)
    stream.prepare(tmp_path / "experts", replace(stream.SMALL, model=SMALL_MOE))
    reverse = reverse_command(tmp_path, tmp_path / "run", 12, num_gpus)
    external = smokes.external_flags(tmp_path, "delta", "http://127.0.0.1:1")
    commands = [
        *[[*reverse, *flags] for flags in ((), crash.FLAGS, *learning.SIDES.values())],
        *[stream.train_command(tmp_path, tmp_path / "run", small, num_gpus) for _, small in stream.BALANCES.values()],
        *[
            smokes.smoke_command(tmp_path, "job", num_gpus, flags)
            for flags in (smokes.COLOCATE, smokes.ppo_flags(num_gpus), external)
        ],
        *[queue_load.side_command(tmp_path, side, stream.SMALL, num_gpus) for side in queue_load.SIDES],
        *[sample_path.side_command(tmp_path, side, stream.SMALL, num_gpus) for side in sample_path.SIDES],
    ]
    for command in commands:
        model = tmp_path / ("experts/model" if "--use-rollout-routing-replay" in command else "model")
        words = ["--hf-checkpoint", str(model), "--prompt-data", str(tmp_path / "prompts.jsonl")]
        validate(resolve([*command[4:], *words]).settings)


def test_a_smoke_with_a_missing_version_or_a_number_that_is_none_fails_by_name() -> None:
    good = [
        {"rollout_id": step, "policy_version": step + 1, "reward_mean": 0.5, "train": {"loss": 0.1}}
        for step in range(4)
    ]
    smokes.check_records("ppo", good)
    with pytest.raises(RunFailedError, match=r"ppo: batches of the versions \[1, 2, 3\], expected: 1 to 4\."):
        smokes.check_records("ppo", good[:3])
    with pytest.raises(RunFailedError, match=r"rollout 3 reported \{'loss': nan\}"):
        smokes.check_records("ppo", [*good[:3], good[3] | {"train": {"loss": float("nan")}}])


def test_gaps_are_over_all_tokens() -> None:
    differences = [np.array([0.1, -0.3]), np.array([0.2])]
    assert mean_gap(differences) == pytest.approx(0.2)
    assert max_gap(differences) == pytest.approx(0.3)
    assert k3_gap(differences) == pytest.approx(np.mean([np.exp(d) - 1 - d for d in (0.1, -0.3, 0.2)]))


def test_what_a_switch_adds_is_told_where_both_gaps_were_measured() -> None:
    assert correct.compared({"parity_mean": 0.25, "raw_mean": 0.75}) == {"parity_mean": 0.25, "raw_adds": 0.5}
    assert correct.compared({"kept_mean": 0.5, "cached_share": 1.0}) == {"cached_share": 1.0}


def test_tokens_before_and_after_a_publication_are_told_apart_in_requests_that_lived_through_it() -> None:
    answers = [SpanningAnswer([5], [6, 7, 8], [-1.0] * 3, versions) for versions in ([1, 1, 2], [2, 2, 2], [1, 1, 1])]
    gaps = [np.array([0.1, 0.2, 0.3])] * 3
    before, after = around(answers, gaps, 2)
    assert [gap.tolist() for gap in before] == [[0.1, 0.2]]
    assert [gap.tolist() for gap in after] == [[0.3]]
    with pytest.raises(RunFailedError, match=r"None of 1 requests lived through the publication of version 2\."):
        around(answers[2:], gaps[2:], 2)


def test_job_is_killed_after_a_step_and_goes_on_to_its_end(tmp_path: Path) -> None:
    killed = job(tmp_path, 6)
    assert killed.killed_after(2) > 0
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) < 6
    assert killed.to_end() > 0
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 6
    assert killed.parity_means() == [0.0031, 0.0031]


def test_job_that_ends_early_is_told_with_its_last_lines(tmp_path: Path) -> None:
    failing = Job([sys.executable, "-c", "print('no room'); raise SystemExit(3)"], tmp_path / "run", tmp_path / "log")
    with pytest.raises(RunFailedError, match=r"ended with status 3. Last lines:\nno room"):
        failing.to_end()


def test_report_names_no_folder() -> None:
    assert without_folder(["--quick", "--folder", "/runs/a", "--lr", "1"]) == ["--quick", "--lr", "1"]
    assert without_folder(["--quick"]) == ["--quick"]


def test_goal_is_reached_when_the_mean_of_five_steps_is() -> None:
    assert reverse_run.steps_to_goal([0.5, 1, 1, 1, 1, 1, 0.2]) == 5
    assert reverse_run.steps_to_goal([0.5] * 20) == 0


def test_a_rate_is_that_of_quick_and_slow_steps_together() -> None:
    waves = [record(step_s, 0.5, 100) for step_s in (1.0, 1.0, 0.5, 3.5, 0.5, 3.5, 0.5, 1.0)]
    assert stream.summarize(waves, waves, generation=100.0)["stream_tokens_per_s"] == pytest.approx(5 * 100 / 8.5)


def test_stream_is_compared_with_the_slower_side_and_with_taking_turns() -> None:
    streaming = [record(5, 1, 10)] * 2 + [record(1.0, 0.9, 100, wait_s=0.1)] * 3 + [record(9, 1, 10)]
    turns = [record(5, 1, 10)] * 2 + [record(2.0, 0.8, 100)] * 3 + [record(9, 1, 10)]
    values = stream.summarize(streaming, turns, generation=100.0)
    assert values["stream_over_slower"] == pytest.approx(1.0)
    assert values["training_tokens_per_s"] == pytest.approx(125)
    assert values["stream_over_turns"] == pytest.approx(2.0)
    assert values["turns_ceiling"] == pytest.approx((1 / 100 + 1 / 125) * 100)
    assert values["ceiling_share"] == pytest.approx(2.0 / values["turns_ceiling"])
    assert values["trainer_idle_share"] == pytest.approx(0.1)


@slow_part(engine=True)
def test_a_killed_run_is_measured_on_a_cpu(tmp_path: Path) -> None:
    values = reverse_run.run(tmp_path / "reverse", 6, [])
    assert (values["lost"], values["trained_twice"]) == ([0.0], [0.0])
    assert values["parity_mean"][0] < 1e-4


@slow_part(engine=True)
@pytest.mark.parametrize("balance", stream.BALANCES)
def test_the_stream_is_measured_on_a_cpu_at_every_balance(tmp_path: Path, balance: str) -> None:
    values = stream.measure(small(tmp_path, balance))
    prefix = "" if balance == stream.PEER else f"{balance}_"
    assert values[f"{prefix}parity_mean"] < 1e-4
    rates = [values[f"{prefix}{what}_tokens_per_s"] for what in ("stream", "generation", "training")]
    assert values[f"{prefix}stream_over_slower"] == rates[0] / min(rates[1:]) > 0
    if balance == stream.PEER:
        assert values["stream_over_peer"] == values["stream_tokens_per_s"] / stream.PEER_TOKENS_PER_S


@slow_part(engine=True)
def test_smokes_run_and_are_checked_on_a_cpu(tmp_path: Path) -> None:
    values = smokes.measure(small(tmp_path))
    for job in ("colocated", "ppo", "full", "delta"):
        assert (values[f"{job}_lost"], values[f"{job}_trained_twice"]) == (0, 0)
        assert values[f"{job}_parity_mean"] < 1e-4
    assert 0 < values["delta_bytes"] < values["full_bytes"]
    assert values["prefill_refused"] == 1


@slow_part(engine=True)
def test_gaps_of_a_rank_and_an_engine_in_bf16_are_measured_on_a_cpu(tmp_path: Path) -> None:
    values = correct.measure(small(tmp_path))
    assert 0 < values["parity_mean"] <= 0.02
    assert values["raw_adds"] > 0.1
    assert 0 < values["bf16_mean"] < 0.02
    assert values["packed_max_fp32"] < 1e-4
    assert values["cached_share"] > 0.5
    assert values["unsalted_adds"] > values["salted_adds"], "a cache of older weights is another model's"
    assert values["stale_adds"] > values["kept_adds"]
    assert values["moe_k3_replayed"] < values["moe_k3"]


def small(folder: Path, *only: str) -> Stages:
    """A call of any length, on the CPU, of all that a part has or of some of it."""
    return Stages(folder, small=True, gpus=0, only=only)


@slow_part(engine=True, multiproc=False)
def test_publications_are_measured_on_a_cpu_in_every_mode_and_on_disk(tmp_path: Path) -> None:
    values = publication.measure(small(tmp_path))
    assert values["pause_over_plain"] == values["keep_pause_s"] / values["plain_s"]
    assert values["abort_lost_tokens"] > 0, "what was aborted is thrown away"
    assert values["wait_pause_s"] > values["keep_pause_s"], "running requests end first"
    assert values["delta_over_full"] < 0.5


@slow_part(engine=True)
def test_the_sample_path_is_measured_on_a_cpu_by_engines(tmp_path: Path) -> None:
    values = sample_path.measure(small(tmp_path, "heads", "routes"))
    assert min(values[name] for name in ("logprob_ratio", "stock_logprob_ratio", "head_ratio", "routes_ratio")) > 0
    assert values["head_over_stock"] > 1, "columns are faster than JSON"


@slow_part(engine=True)
def test_the_sample_path_is_measured_on_a_cpu_through_the_queue(tmp_path: Path) -> None:
    values = sample_path.measure(small(tmp_path, *map(sample_path.queued, sample_path.SIDES)))
    assert min(values[f"queued_tokens_per_s_{side}"] for side in sample_path.SIDES) > 0
    ratio = values["queued_tokens_per_s_head"] / values["queued_tokens_per_s_logprob"]
    assert values["queued_head_over_logprob"] == ratio


@slow_part()
def test_the_learner_is_measured_on_a_cpu(tmp_path: Path) -> None:
    values = learner.measure(small(tmp_path))
    assert 0 < values["utilisation_8k"] < 1
    assert values["tokens_per_s_32k"] == pytest.approx(1024 / values["step_s_32k"])
    assert values["replay_over_own"] > 0
    assert values["head_memory_with_entropy_over_dense"] > 0


@slow_part(engine=True)
def test_the_queue_is_measured_under_load_on_a_cpu(tmp_path: Path) -> None:
    values = queue_load.measure(small(tmp_path))
    assert values["straw_over_memory"] == values["straw_step_s"] / values["memory_step_s"]


@slow_part(engine=True, timeout_s=1800)
def test_a_job_on_a_cpu_survives_the_kill_of_each_role_and_loses_nothing(tmp_path: Path) -> None:
    values = crash.measure(small(tmp_path))
    assert min(values[f"{victim.value}_over_cold"] for victim in crash.VICTIMS) > 0
    assert values["restarts"] >= 1, "a job whose tree is killed is started again"
    assert (values["lost"], values["trained_twice"]) == (0, 0)


@slow_part(engine=True)
def test_learning_is_timed_on_a_cpu_as_a_stream_and_synchronously(tmp_path: Path) -> None:
    values = learning.measure(small(tmp_path))
    assert values["async_steps"] >= reverse_run.WINDOW
    assert values["sync_staleness_max"] == 0
    assert values["async_staleness_max"] <= 4


@slow_part(timeout_s=1800)
def test_layouts_in_bf16_stay_near_one_rank_in_fp32(tmp_path: Path) -> None:
    values = layouts.measure(small(tmp_path))
    for layout in layouts.LAYOUTS:
        assert 0 < values[f"{layout}_log_probs"] < 0.5
    assert values["k3_gap_cut"] > 1
