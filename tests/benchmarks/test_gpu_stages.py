"""What the parts of the suite for GPUs share: stages, budgets and kills; and the formulas of single parts."""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.chaos.kills import Victim
from benchmarks.gpu import engines, publication, sample_path
from benchmarks.gpu.crash import STEPS_BEFORE, Crashes
from benchmarks.gpu.jobs import BudgetSpentError, Job, RunningJob
from benchmarks.gpu.learner import make_sequences, step_flops
from benchmarks.gpu.part import AGAIN_STATUS, Part, Stages, results_folder, run_part
from benchmarks.gpu.programs import medians_of
from benchmarks.gpu.publication import CHANGED_EVERY, ChangingWeights, lost_tokens
from benchmarks.gpu.traffic import Window
from tests.support.tiny_models import build_tiny_qwen3
from vime.errors import RunFailedError, SettingsError

DRIVER = """
import json, subprocess, sys, time
from pathlib import Path
path, replaces = Path(sys.argv[1]) / "metrics.jsonl", sys.argv[2] == "replaces"
path.parent.mkdir(exist_ok=True)
def worker():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "ray::" + "TrainerActor"])
child = worker()
step = 0
while True:
    if child.poll() is not None:
        if not replaces:
            raise SystemExit(5)
        child = worker()
    with path.open("a") as file:
        file.write(json.dumps({"rollout_id": step, "policy_version": step}) + chr(10))
    step += 1
    time.sleep(0.1)
"""


def job(folder: Path, what: str, **more: float) -> Job:
    return Job([sys.executable, "-c", DRIVER, str(folder / "run"), what], folder / "run", folder / "log", **more)


def call(folder: Path, budget_s: float = 1000.0) -> Stages:
    return Stages(folder, small=True, gpus=0, budget_s=budget_s)


def test_a_stage_that_has_ended_is_not_measured_again_by_a_later_call(tmp_path: Path) -> None:
    found = call(tmp_path).once("one", lambda: {"value": 1.5})
    assert found == {"value": 1.5}
    again = call(tmp_path)
    assert again.once("one", lambda: {"value": 2.0}) == {"value": 1.5}
    assert again.seconds >= 0


def test_a_stage_is_not_begun_when_its_time_is_not_left(tmp_path: Path) -> None:
    stages = call(tmp_path, budget_s=30)
    with pytest.raises(BudgetSpentError, match=r"The stage one needs about 60 s, left: 30 s\."):
        stages.once("one", lambda: {"value": 1.5}, needs_s=60)
    assert stages.once("two", lambda: {"value": 2.5}, needs_s=10) == {"value": 2.5}


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    call(tmp_path).once("one", lambda: {"value": 1.5})
    with pytest.raises(SettingsError, match=r"allowed: \{'small': False"):
        Stages(tmp_path, small=False, gpus=0)


def test_stages_of_calls_side_by_side_are_found_by_a_later_one(tmp_path: Path) -> None:
    one, other = call(tmp_path), call(tmp_path)
    one.once("one", lambda: {"value": 1.5})
    other.once("two", lambda: {"value": 2.5})
    later = call(tmp_path)
    assert later.once("one", dict) | later.once("two", dict) == {"value": 2.5}
    assert later.once("one", dict) == {"value": 1.5}


def test_a_model_is_made_once_while_other_calls_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def build(folder: Path, **_shape: object) -> None:
        made.append(folder)
        with (folder.parent / "making.lock").open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.mkdir()
        (folder / "tokenizer_config.json").touch()

    monkeypatch.setattr(engines, "build_tiny_qwen3", build)
    models = [engines.model_in(tmp_path / "calls" / "model", small=True) for _ in range(2)]
    assert models == [tmp_path / "calls" / "model"] * 2
    assert made == models[:1]


def test_only_the_chosen_stages_of_the_sample_path_are_measured(tmp_path: Path) -> None:
    stages = Stages(tmp_path, small=True, gpus=0, only=["queued_head", "queued_logprob"])
    for side, rate in (("head", 80.0), ("logprob", 100.0)):
        stages.once(f"queued_{side}", partial(dict, {f"queued_tokens_per_s_{side}": rate}))
    assert sample_path.measure(stages) == {
        "queued_tokens_per_s_head": 80.0,
        "queued_tokens_per_s_logprob": 100.0,
        "queued_head_over_logprob": 0.8,
    }


@pytest.mark.parametrize(("gpus", "ratio"), [(0, "pause_over_plain"), (1, "pause_over_copy")])
def test_only_the_chosen_stages_of_publications_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, ratio: str
) -> None:
    monkeypatch.setattr(publication, "ChangingWeights", lambda _model, _gpus: ChangingWeights(_model, 0))
    stages = Stages(tmp_path, small=True, gpus=gpus, only=["running"])
    stages.once("plain", lambda: {"plain_s": 0.5})
    stages.once("running", lambda: {"keep_pause_s": 0.75})
    assert publication.measure(stages) == {"plain_s": 0.5, "keep_pause_s": 0.75, ratio: 1.5}


def test_a_part_whose_budget_is_spent_goes_on_at_the_next_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def measure(stages: Stages) -> Mapping[str, float]:
        first = stages.once("first", lambda: measured.append("first") or {"a": 1.0}, needs_s=10)
        return first | stages.once("second", lambda: {"b": 2.0}, needs_s=200)

    part = Part("example", "An example.", measure, ("torch",))
    words = ["--quick", "--json", "--folder", str(tmp_path)]
    assert run_part(part, [*words, "--budget", "100"]) == AGAIN_STATUS
    told = capsys.readouterr()
    assert told.out == ""
    assert "The stage second needs about 200 s" in told.err
    assert run_part(part, words) == 0
    report = json.loads(capsys.readouterr().out)
    assert measured == ["first"]
    assert report["benchmark"] == "gpu.example"
    assert report["command"] == "python -m benchmarks.gpu.example --quick --json"
    assert {name: value["median"] for name, value in report["values"].items()} == {"a": 1.0, "b": 2.0}


def test_a_part_measures_only_what_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = Part(
        "example", "An example.", lambda stages: dict.fromkeys(stages.only, 1.0), ("torch",), choices=("a", "b")
    )
    assert run_part(part, ["--quick", "--json", "--folder", str(tmp_path), "--only", "b"]) == 0
    assert list(json.loads(capsys.readouterr().out)["values"]) == ["b"]


@pytest.mark.parametrize(("gpus", "folder"), [(0, "gpu"), (1, "gpu_shared"), (2, "gpu")])
def test_results_of_trainer_and_engine_on_one_gpu_are_kept_apart(gpus: int, folder: str) -> None:
    assert results_folder(gpus) == folder


def test_a_job_whose_time_is_over_is_ended_and_told(tmp_path: Path) -> None:
    late = job(tmp_path, "replaces", deadline=0.0)
    started: list[RunningJob] = []

    def wait() -> None:
        with late.running() as running:
            started.append(running)
            running.until(lambda: False)

    with pytest.raises(BudgetSpentError, match="the time of this call is spent"):
        wait()
    assert started[0].ended


def test_a_job_that_ends_by_a_kill_is_started_again(tmp_path: Path) -> None:
    with Crashes(job(tmp_path, "ends")) as crashes:
        assert crashes.cold_start()["cold_start_s"] > 0
        found = crashes.kill_to_step(Victim.TRAINER)
    assert found["trainer_restarts"] == 1
    assert found["trainer_s"] > 0
    steps = [json.loads(line)["rollout_id"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps.index(0, 1) > STEPS_BEFORE


def test_a_job_that_replaces_what_was_killed_goes_on(tmp_path: Path) -> None:
    with Crashes(job(tmp_path, "replaces")) as crashes:
        assert crashes.kill_to_step(Victim.TRAINER)["trainer_restarts"] == 0


def test_a_role_without_a_process_is_named(tmp_path: Path) -> None:
    with job(tmp_path, "replaces").running() as running:
        running.first_step_s()
        with pytest.raises(RunFailedError, match="has no process of the role engine"):
            running.kill(Victim.ENGINE)


def test_tokens_are_lost_that_were_not_made_or_are_thrown_away() -> None:
    undisturbed = Window(seconds=10.0, tokens=1000, thrown_away=0)
    assert lost_tokens(undisturbed, Window(seconds=10.0, tokens=900, thrown_away=50)) == 150
    assert lost_tokens(undisturbed, Window(seconds=11.0, tokens=1100, thrown_away=0)) == 0


def test_each_version_changes_a_few_last_bits_of_the_one_before(tmp_path: Path) -> None:
    weights = ChangingWeights(build_tiny_qwen3(tmp_path / "model"), gpus=0)
    before = {name: tensor.clone() for name, tensor in weights.named_hf_weights()}
    weights.step()
    after = dict(weights.named_hf_weights())
    changed = sum(int((after[name] != before[name]).sum()) for name in before)
    total = sum(tensor.numel() for tensor in before.values())
    assert changed == pytest.approx(total / CHANGED_EVERY, rel=0.05)
    assert max(float((after[name] - before[name]).abs().max()) for name in before) < 1e-6


@pytest.mark.parametrize("num_experts", [None, 8])
def test_the_work_of_a_step_is_that_of_its_products(tmp_path: Path, num_experts: int | None) -> None:
    folder = build_tiny_qwen3(tmp_path / "model", num_experts=num_experts, tied=False)
    shape = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    matrices = {name: tensor.numel() for name, tensor in weights.items() if tensor.dim() == 2 and "embed" not in name}
    head = matrices.pop("lm_head.weight")
    experts = sum(size for name, size in matrices.items() if ".experts." in name)
    used = sum(matrices.values()) - experts + experts * shape.get("num_experts_per_tok", 1) / (num_experts or 1)
    sequences = make_sequences(256, 64, shape["vocab_size"])
    # Each token of 64 looks at about half of them, in two products of 4 heads of 32 numbers, in 2 layers.
    attention = 2 * 2 * 2 * 256 * (64 / 2) * 4 * 32
    assert step_flops(shape, sequences) == 3 * (2 * used * 256 + 2 * head * 4 * 56 + attention)


def test_a_program_that_fails_is_named_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"ended with status 1:\n.*No module named benchmarks\.nothing"):
        medians_of("benchmarks.nothing", [], call(tmp_path))
