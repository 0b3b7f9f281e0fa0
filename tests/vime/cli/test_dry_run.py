"""`vime train --dry-run`: words, JSON, problems and their exit status; nothing is started or written."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.preview.planned import write_job
from vime.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
SIXTEEN = [
    "--actor-num-gpus-per-node", "8", "--rollout-num-gpus", "8", "--assume-gpus", "16", "--flush-cache-interval", "4",
    "--use-dynamic-batch-size", "--max-tokens-per-gpu", "9216", "--tensor-model-parallel-size", "2",
]  # fmt: skip


def run(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    status = main(["train", "--dry-run", *write_job(folder), *more])
    return status, capsys.readouterr().out


def run_json(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any]]:
    status, out = run(folder, capsys, "--json", *more)
    record: dict[str, Any] = json.loads(out)
    return status, record


def test_sixteen_assumed_gpus_are_planned_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(tmp_path, capsys, *SIXTEEN)
    assert status == 0
    for line in (
        "16 GPUs (assumed)",
        "8 ranks = tensor 2 x context 1 x data 4 x pipeline 1",
        "rank 7: node 0 GPU 7 (tp 1 cp 0 dp 3 pp 0)",
        "engine 7: node 1 GPU 7",
        "32 groups x 8 = 256 samples a rollout batch, 20 rollout batches",
        "64 samples of a step on each data-parallel rank, in microbatches of up to 9216 tokens",
        "version 5: after rollout 3, flush",
        "version 6: after rollout 4, keep",
        "No sample is older than 5 versions",
        "Checkpoint: 44.95 GiB (4022 M parameters), 4 commits",
        "Reward 1 for the label 'answer 0'",
        "3 prompts",
        "Nothing was started.",
    ):
        assert line in out
    assert "--flush-cache-interval" in out
    assert "--temperature" not in out, "only settings that differ are listed"
    assert not (tmp_path / "run").exists()


def test_counts_of_one_have_their_noun_in_the_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--assume-gpus", "2", "--num-rollout", "1", "--rollout-batch-size", "1", "--n-samples-per-prompt", "1"]
    _, out = run(tmp_path, capsys, *flags)
    assert "Trainer: 1 rank = " in out
    assert "1 group x 1 = 1 sample a rollout batch, 1 rollout batch\n" in out
    assert not re.search(r"\b1 (ranks|groups|samples|commits|optimizer steps|versions|problems|warnings)\b", out)
    assert "(s)" not in out
    assert "processs" not in out


def test_json_holds_every_setting_with_its_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "job.toml"
    config.write_text("[data]\nrollout_shuffle = true\n")
    status, record = run_json(tmp_path, capsys, *SIXTEEN, "--config", str(config), "--wandb-key", "hush")
    rows = {row["flag"]: row for row in record["settings"]}
    assert status == 0
    assert len(rows) > 200
    assert rows["--rollout-batch-size"]["source"] == "flag"
    assert rows["--rollout-shuffle"]["source"] == f"file:{config}"
    assert (rows["--rollout-temperature"]["value"], rows["--rollout-temperature"]["source"]) == (1.0, "default")
    assert rows["--wandb-key"]["value"] == "***"
    assert len(record["processes"]["trainers"]) == 8
    assert record["processes"]["engines"][7]["devices"] == [{"node": 1, "gpu": 7}]
    assert [item["flushes"] for item in record["publications"]] == [v in (1, 5, 9) for v in range(1, 11)]
    assert record["passed_on"]["megatron"] == ["--tensor-model-parallel-size", "2"]
    assert record["staleness"]["most"] == 5
    assert record["disk"]["checkpoint_bytes"] == 12 * record["disk"]["parameters"]
    assert [trial["reward"] for trial in record["rehearsal"]["reward"]] == [1.0, 1.0]
    assert record["problems"] == []


def test_hooks_are_imported_and_their_arguments_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--assume-gpus", "8", "--rollout-sample-hook-path"]
    _, out = run(tmp_path, capsys, *flags, "tests.vime.cli.dry_run_rewards.on_sample")
    assert "--rollout-sample-hook-path tests.vime.cli.dry_run_rewards.on_sample: imported" in out
    assert main(["train", "--dry-run", *write_job(tmp_path), *flags, "tests.vime.cli.dry_run_rewards.refuses"]) == 1
    assert "can't be called as documented" in capsys.readouterr().err


def test_refusals_are_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--actor-num-gpus-per-node", "8", "--colocate", "--assume-gpus", "16", "--profile")
    status, record = run_json(tmp_path, capsys, *flags)
    assert status == 0
    assert any("--profile" in warning for warning in record["warnings"])
    assert record["processes"]["shape"] == "colocated"


def test_closing_line_counts_what_a_start_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--assume-gpus", "8", "--profile"]
    status, out = run(tmp_path, capsys, *flags)
    closing = out.splitlines()[-1]
    assert status == 0
    assert closing.startswith("A start would refuse 1 setting not built yet (see the warnings). No other problem")
    _, record = run_json(tmp_path, capsys, *flags)
    assert [words.split(" ")[0] for words in record["refused"]] == ["--profile"]
    _, out = run(tmp_path, capsys, "--assume-gpus", "8")
    assert out.splitlines()[-1].startswith("No problem was found, ")


def test_too_few_gpus_are_a_problem_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(tmp_path, capsys, "--actor-num-gpus-per-node", "8", "--assume-gpus", "4")
    assert status == 1
    assert "9 GPUs; --assume-gpus gives 4" in out
    assert "A start would fail: 1 problem," in out


def test_failing_reward_is_a_problem_of_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = "tests.vime.cli.dry_run_rewards.refuses"
    status, out = run(tmp_path, capsys, "--custom-rm-path", path, "--assume-gpus", "8")
    assert status == 3
    assert "prompts.jsonl:1, with its label as the response" in out
    assert "the reward raised KeyError: 'no such label'" in out


def test_reward_of_whole_groups_is_tried_with_a_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = "tests.vime.cli.dry_run_rewards.too_few"
    status, out = run(tmp_path, capsys, "--custom-rm-path", path, "--group-rm", "--assume-gpus", "8")
    assert status == 3
    assert "the reward returned 0, allowed: a list of 8" in out


def test_skipped_prompt_records_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write_job(tmp_path)
    good = '{"input": "fine", "label": "x"}\n'
    (tmp_path / "prompts.jsonl").write_text(good + '{"input": \n' + good * 8)
    assert main(["train", "--dry-run", *words, "--assume-gpus", "8", "--bad-prompt-records", "skip"]) == 0
    assert "1 malformed prompt record is skipped" in capsys.readouterr().out


def test_bad_prompt_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write_job(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"input": "fine", "label": "x"}\n{"input": \n')
    assert main(["train", "--dry-run", *words, "--assume-gpus", "8"]) == 3
    assert "prompts.jsonl:2" in capsys.readouterr().out


def test_unusable_evaluation_data_is_a_problem_named_with_its_data_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = write_job(tmp_path)
    (tmp_path / "held_out.jsonl").write_text('{"question": "no label"}\n')
    evaluated = ["--eval-interval", "1", "--eval-prompt-data", "held_out", str(tmp_path / "held_out.jsonl")]
    assert main(["train", "--dry-run", *words, "--assume-gpus", "8", *evaluated]) == 3
    assert "evaluation data set held_out: " in capsys.readouterr().out


def test_missing_prompt_file_is_a_problem_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write_job(tmp_path)
    (tmp_path / "prompts.jsonl").unlink()
    assert main(["train", "--dry-run", *words, "--assume-gpus", "8"]) == 1
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--json"], ["--assume-gpus", "4"]])
def test_flags_of_the_dry_run_alone_are_refused(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *write_job(tmp_path), *flags]) == 1
    assert f"{flags[0]} goes with --dry-run only" in capsys.readouterr().err


def test_a_dry_run_loads_no_framework(tmp_path: Path) -> None:
    code = (
        "import sys; from vime.cli.main import main; status = main(sys.argv[1:]); "
        "print([m for m in ('torch', 'ray', 'vllm', 'megatron', 'transformers') if m in sys.modules]); "
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "--dry-run", *write_job(tmp_path), "--assume-gpus", "8"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_wrong_flags_hide_no_wrong_file_and_no_wrong_function(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-rolout", "5", "--lr", "-1", "--hf-checkpoint", "/nowhere", "--prompt-data", "/nowhere.jsonl"]
    more = ["--rollout-batch-sze", "3", "--custom-rm-path", "no.such.module", "--foo-bar-baz"]
    assert main(["train", "--dry-run", *words, *more]) == 1
    said = capsys.readouterr().err
    assert "7 settings can't work:" in said
    for told in (
        "--num-rolout is not a flag", "--rollout-batch-sze is not a flag", "--lr is -1.0", "--hf-checkpoint /nowhere",
        "--prompt-data /nowhere.jsonl: no such file", "--custom-rm-path no.such.module",
        "--foo-bar-baz is a flag neither",
    ):  # fmt: skip
        assert told in said
    assert "Missing" not in said, "what is misspelt is not told as missing"


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--custom-rm-path", "no.such.module"), ("--custom-rm-path", f"{__name__}.absent"), ("--rm-type", "absent")],
)
def test_a_reward_that_is_not_there_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    words = write_job(tmp_path)
    place = words.index("--rm-type")
    assert main(["train", "--dry-run", *words[:place], flag, value, *words[place + 2 :]]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"\nvime: {flag}"), "nothing else is wrong, so there is no list"
    assert "settings can't work" not in said


def test_the_examples_of_the_help_can_be_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    example = capsys.readouterr().out.split("  vime train --hf-checkpoint ")[1].split("\n\n")[0]
    words = f"--hf-checkpoint {example}".replace("\\\n", " ").split()
    write_job(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
    places = {"models/qwen3": tmp_path, "prompts.jsonl": tmp_path / "prompts.jsonl", "runs/a": tmp_path / "run"}
    given = [str(places.get(word, word)) for word in words if word != "--apply-chat-template"]
    assert len(given) == len(words) - 1, "the test's model has no template"
    assert main(["train", "--dry-run", "--assume-gpus", "2", *given]) == 0
    assert "No problem was found" in capsys.readouterr().out


def test_a_provider_of_flags_that_cannot_be_loaded_hides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "--extra-args-provider-path", "no.such.module", "--lr", "-1"]) == 1
    said = capsys.readouterr().err
    assert "--lr is -1.0" in said
    assert said.count("no.such.module") == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--input-key", "question"], "no key 'question'"),
        (["--custom-rm-path", "tests.vime.cli.dry_run_rewards.refuses"], "with its label as the response"),
    ],
)
def test_settings_that_contradict_each_other_hide_neither_columns_nor_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], told: str
) -> None:
    assert main(["train", "--dry-run", *write_job(tmp_path), "--global-batch-size", "3", *flags]) == 1
    said = capsys.readouterr().err
    assert "2 settings can't work:" in said
    assert "1. --global-batch-size is 3" in said
    assert told in said
