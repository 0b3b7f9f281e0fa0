"""All problems at once, refusals and advice."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.vime.settings.wrong_inputs.case import Case
from vime.cli.main import main
from vime.errors import SettingsError
from vime.settings.machine import Machine, Node
from vime.settings.parse import parse_settings
from vime.settings.rules import Problem
from vime.settings.validate import find_problems, validate

ROOT = Path(__file__).resolve().parents[3]

PROMPTS = {"prompts.jsonl": '{"input": "a question"}\n'}


def refusal(tmp_path: Path, words: str, *, dry_run: bool = False, more: tuple[Problem, ...] = ()) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        validate(parse_settings(Case(words, "", "", "").command(tmp_path)), dry_run=dry_run, more=more)
    return caught.value


def test_one_problem_is_told_without_a_list(tmp_path: Path) -> None:
    error = refusal(tmp_path, "--global-batch-size 3")
    assert error.message == (
        "--global-batch-size is 3, but a rollout batch has 4 x 2 = 8 samples, allowed: a divisor of that. "
        "Samples that fill no optimizer step would be thrown away."
    )
    assert error.next_step == "Change one of the three."


def test_all_problems_and_refusals_come_in_one_numbered_list(tmp_path: Path) -> None:
    found_by_others = Problem(("--x",), "--x is 1", "2", "", "Give 2.")
    error = refusal(tmp_path, "--no-save-rng --global-batch-size 3 --profile", more=(found_by_others,))
    title, *lines = error.message.splitlines()
    assert title == "4 settings can't work:"
    assert [line.split(" ")[0] for line in lines] == ["1.", "2.", "3.", "4."]
    assert lines[0].startswith("1. --global-batch-size is 3")
    assert lines[0].endswith("Next: Change one of the three.")
    assert lines[1] == (
        "2. --no-save-rng, allowed: left out. A restarted trainer must continue with the same random numbers. "
        "Next: Leave out --no-save-rng."
    )
    assert lines[2] == "3. --x is 1, allowed: 2. Next: Give 2."
    assert lines[3].startswith("4. --profile is not built yet, allowed: with --use-pytorch-profiler.")
    assert error.next_step == "Correct these and start again."


def test_a_dry_run_warns_of_what_is_not_built_and_refuses_what_cannot_work(tmp_path: Path) -> None:
    warnings = validate(parse_settings(Case("--profile", "", "", "").command(tmp_path)), dry_run=True)
    assert [words.split(" is not built yet")[0] for words in warnings] == ["--profile"]
    error = refusal(tmp_path, "--profile --no-save-rng", dry_run=True)
    assert error.message.startswith("--no-save-rng, allowed: left out")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--n-samples-per-prompt 1", "a reward minus the mean of its group is always 0"),
        ("--advantage-estimator cispo", "--eps-clip is 0.2 with --advantage-estimator cispo"),
        ("--use-dynamic-batch-size --max-tokens-per-gpu 64 --micro-batch-size 2", "--micro-batch-size 2 has no effect"),
        ("--use-score-centering --rollout-top-p 0.9 --score-centering-top-k 64", "--score-centering-top-k 64 has no"),
        ("--gamma 0.9", "--gamma has no effect without --advantage-estimator reinforce_plus_plus or ppo"),
        ("--tis-clip 3", "--tis-clip has no effect without --use-tis"),
        ("--tis-clip-low 1", "--tis-clip-low has no effect without --use-tis"),
        ("--opsm-delta 0.1", "--opsm-delta has no effect without --use-opsm"),
        ("--mtp-loss-scaling-factor 0.1", "--mtp-loss-scaling-factor has no effect without --mtp-num-layers"),
        ("--rollout-session-timeout 5", "--rollout-session-timeout has no effect without --rollout-session-id"),
        ("--rollout-health-check-interval 5", "--rollout-health-check-interval has no effect"),
    ],
)
def test_what_hardly_works_as_meant_is_told(tmp_path: Path, words: str, said: str) -> None:
    first = validate(parse_settings(Case(words, "", "", "").command(tmp_path)), dry_run=True)[0]
    assert said in first


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--n-samples-per-prompt 1 --disable-rewards-normalization",
        "--n-samples-per-prompt 1 --advantage-estimator ppo",
        "--n-samples-per-prompt 1 --custom-advantage-function-path vime.a.b",
        "--advantage-estimator cispo --eps-clip 1",
        "--micro-batch-size 2",
        "--use-score-centering --rollout-top-p 0.9",
        "--score-centering-top-k 64 --rollout-top-p 0.9",
        "--use-score-centering --score-centering-top-k 64",
        "--advantage-estimator reinforce_plus_plus --normalize-advantages --gamma 0.9",
        "--use-tis --tis-clip 3 --tis-clip-low 1",
        "--get-mismatch-metrics --custom-tis-function-path vime.a.b --tis-clip 3",
        "--use-opsm --opsm-delta 0.1",
    ],
)
def test_what_works_as_meant_is_not_told(tmp_path: Path, words: str) -> None:
    warnings = validate(parse_settings(Case(words, "", "", "").command(tmp_path)), dry_run=True)
    assert [text for text in warnings if "is not built yet" not in text] == []


def test_no_rule_fails_on_settings_without_any_flag() -> None:
    machine = Machine((Node("a", 0),), "0.26.0")
    found = {problem.flags[0] for problem in find_problems(parse_settings([]), machine)}
    assert found == {"--hf-checkpoint", "--rm-type", "--save", "--actor-num-nodes"}


def test_a_real_start_refuses_more_gpus_than_exist_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--actor-num-gpus-per-node 4000 --rollout-batch-size 4000"
    started = time.monotonic()
    assert main(["train", *Case(words, "", "", "").command(tmp_path)]) == 1
    assert time.monotonic() - started < 5
    said = capsys.readouterr().err
    assert "The run needs 4000 (training) and 1 (generation) = 4001 GPUs" in said
    assert not (tmp_path / "run").exists()


def test_a_flag_of_sglang_is_told_with_the_one_of_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--sglang-mem-fraction-static 0.7 --sglang-log-level info"
    assert main(["train", "--dry-run", *Case(words, "", "", "", files=PROMPTS).command(tmp_path)]) == 1
    first, second = capsys.readouterr().err.splitlines()[2:4]
    assert "--sglang-mem-fraction-static is a flag of SGLang, allowed: flags of vime's engine, which is vLLM" in first
    assert "The nearest one is --vllm-gpu-memory-utilization." in first
    assert "--sglang-log-level is a flag of SGLang" in second
    assert "nearest" not in second


def test_a_flag_that_megatron_does_not_know_comes_in_the_same_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = frozenset({"--recompute-granularity"})
    monkeypatch.setattr("vime.backends.megatron_utils.arguments.known_megatron_flags", lambda: known)
    words = "--recompute-granulation full --no-save-rng"
    assert main(["train", "--dry-run", *Case(words, "", "", "", files=PROMPTS).command(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "2 settings can't work:" in said
    assert "2. --recompute-granulation is a flag neither of vime nor of the installed Megatron" in said
    assert "The nearest one is --recompute-granularity. Next: Correct or remove the flag." in said


def test_flags_that_nobody_knows_come_in_the_same_list_with_contradictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vime.backends.megatron_utils.arguments.known_megatron_flags", lambda: pytest.fail("loaded"))
    monkeypatch.setattr("vime.backends.vllm_utils.arguments.known_options", lambda: frozenset({"--max-model-len"}))
    words = "--no-vllm-enable-prefix-caching --vllm-max-model-lem 9 --router-polizy x --num-layers 3"
    assert main(["train", "--dry-run", *Case(words, "", "", "", files=PROMPTS).command(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "4 settings can't work:" in said
    assert "1. --num-layers is 3, but config.json (num_hidden_layers) has 28, allowed: 28, or left out." in said
    assert "The nearest one is --vllm-no-enable-prefix-caching." in said
    assert "3. --vllm-max-model-lem is not an option of the installed vLLM" in said
    assert "the nearest one is --router-policy" in said


def test_files_are_warned_about_in_a_dry_run(tmp_path: Path) -> None:
    files = {"m.yaml": "megatron: [{role: actor, overrides: {my_knob: 1}}]"}
    words = "--megatron-config-path $DIR/m.yaml"
    settings = parse_settings(Case(words, "", "", "", files=files).command(tmp_path))
    first, *_ = validate(settings, dry_run=True)
    assert "megatron[0].overrides.my_knob is no known argument" in first


def test_help_and_validation_load_no_framework() -> None:
    heavy = ("numpy", "torch", "ray", "vllm", "megatron", "transformers", "yaml")
    program = (
        "import sys, vime.settings.validate, vime.settings.machine, vime.settings.parser, vime.rollout.hooks\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
