"""`vime train --help` and how little it loads."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from vime.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
HEAVY = {"torch", "vllm", "ray", "transformers", "megatron", "numpy", "pandas", "pyarrow", "yaml"}


def test_help_shows_the_most_used_flags_first_and_every_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    order = [text.index(title) for title in ("most used:", "checkpoint:", "objective:", "queue:", "command:")]
    assert order == sorted(order)
    assert text.index("most used:") < text.index("--hf-checkpoint") < text.index("checkpoint:")
    assert text.count("--hf-checkpoint STR") == 1


def test_help_marks_what_is_not_built_as_the_documentation_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    entries = re.split(r"\n  (?=--)", text.partition("\nFlags that")[0])[1:]
    rows = (ROOT / "docs" / "flags.md").read_text().partition("## Not built yet")[0]
    marked = set(re.findall(r"^\| `(--[^`]+)`[^|]* † \|", rows, re.MULTILINE))
    assert "--prefill-num-servers" in marked
    assert {entry.split()[0].rstrip(",") for entry in entries if "†" in entry} == marked
    assert "† is not built yet, or not for all values" in text


def test_help_loads_no_framework_and_takes_less_than_a_second() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "vime", "train", "--help"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "vime" in loaded
    assert not loaded & HEAVY
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= 1.0


@pytest.mark.slow
def test_an_unknown_flag_is_refused_with_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "p.jsonl").touch()
    status = main([
        "train", "--dry-run", "--hf-checkpoint", str(tmp_path), "--prompt-data", str(tmp_path / "p.jsonl"),
        "--num-rollout", "3", "--rollout-batch-size", "8", "--rollout-max-response-len", "8", "--rm-type", "random",
        "--save", "run", "--tensor-model-parallel-sise", "2",
    ])  # fmt: skip
    assert status == 1
    assert "The nearest one is --tensor-model-parallel-size" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "listed", "owned"),
    [
        ("--help-megatron", "--tensor-model-parallel-size", "--lr\n"),
        ("--help-vllm", "--vllm-max-model-len", "--vllm-model\n"),
    ],
)
def test_help_lists_the_flags_of_others(flag: str, listed: str, owned: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", flag]) == 0
    text = capsys.readouterr().out
    assert f"  {listed}\n" in text
    assert f"  {owned}" not in text
