"""The commands of docs/convert.md do what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import build_tiny_qwen3

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "convert.md"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run_command(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    script = "import sys; from vime.cli.main import main; sys.exit(main())"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


def test_the_pages_commands_run_in_order_and_print_what_it_shows(tmp_path: Path) -> None:
    build_tiny_qwen3(tmp_path / "models" / "qwen3")
    commands = re.findall(r"^\$ vime (convert .+)$", PAGE.read_text(), re.MULTILINE)
    assert len(commands) == 4
    printed = []
    for command in commands:
        done = run_command(command.split(), tmp_path)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    pattern = r"models/qwen3_torch_dist: 24 tensors, [\d.]+ MiB, read back and equal \(digest ([0-9a-f]{32})\)\."
    first = re.match(pattern, printed[0])
    assert first is not None, printed[0]
    assert "Logits on a probe differ by" in printed[0]
    assert first[1] in printed[1], "the same model has the same digest in every format"
    assert first[1] in printed[2]
    assert "--skip-logits" in printed[3]
    original, back = ((tmp_path / "models" / name / "config.json").read_text() for name in ("qwen3", "qwen3_back"))
    assert original == back


def test_mistakes_on_the_command_line_end_with_a_next_step(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    done = run_command(["convert", "model", "out", "--to", "hf"], tmp_path)
    assert done.returncode == 1
    assert "model holds neither *.safetensors nor latest_checkpointed_iteration.txt." in done.stderr
    assert "Next: Give the folder of a Hugging Face model or of Megatron checkpoints." in done.stderr
