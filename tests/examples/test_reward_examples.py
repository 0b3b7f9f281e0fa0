"""The command lines of all examples but `reverse`, and those with rewards of their own for two rollouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recovery.audit import audit_run
from vime.settings.parse import parse_settings
from vime.settings.validate import validate

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    "gym": "model",
    "judge": "example/model",
    "multi_turn_tool": "example/model",
    "evaluation": "example/model",
}


@pytest.mark.parametrize(("name", "model"), EXAMPLES.items())
def test_the_command_line_passes_every_check(tmp_path: Path, name: str, model: str) -> None:
    """Runs a copy of run.sh whose `vime` records its arguments."""
    commands, folder = tmp_path / ".venv" / "bin", tmp_path / "out"
    for made in (commands, folder / model, tmp_path / "examples" / name):
        made.mkdir(parents=True)
    (folder / model / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "example").mkdir(exist_ok=True)
    (folder / "example" / "prompts.jsonl").touch()
    script = tmp_path / "examples" / name / "run.sh"
    script.write_bytes((ROOT / "examples" / name / "run.sh").read_bytes())
    (commands / "vime").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    # The judge is started in the background and has to name its address.
    (commands / "python").write_text(f'#!/bin/sh\necho http://127.0.0.1:1/judge > "{folder}/judge_address"\n')
    for command in ("vime", "python"):
        (commands / command).chmod(0o755)
    done = subprocess.run(["bash", script, folder, "--num-rollout", "2"], check=True, capture_output=True, text=True)
    command, *arguments = done.stdout.splitlines()
    assert command == "train"
    settings = parse_settings(arguments)
    validate(settings)
    assert settings.data.num_rollout == 2
    assert settings.megatron_args == ()


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.multiproc
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["gym", "judge", "multi_turn_tool"])
def test_two_rollouts_are_rewarded_and_trained(tmp_path: Path, name: str) -> None:
    if name == "gym":
        pytest.importorskip("reasoning_gym", reason="an optional package: requirements/tasks.txt")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    words = ["--num-rollout", "2", "--rollout-batch-size", "8"]
    done = subprocess.run(
        ["bash", ROOT / "examples" / name / "run.sh", tmp_path, *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    assert all(0.1 < step["reward_mean"] < 0.95 for step in steps)
    report = audit_run(tmp_path / "run")
    assert (report.lost, report.trained_twice, report.trained) == ([], [], 16)
