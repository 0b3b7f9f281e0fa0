"""The command line in `examples/reverse/run.sh` is one that vime accepts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from vime.settings.groups import Settings
from vime.settings.import_paths import load_function
from vime.settings.parse import parse_settings
from vime.settings.validate import validate

ROOT = Path(__file__).resolve().parents[3]


def settings_of_run_sh(tmp_path: Path) -> Settings:
    """Run a copy of run.sh whose `vime` records its arguments; return them parsed."""
    commands, script = tmp_path / ".venv" / "bin", tmp_path / "examples" / "reverse" / "run.sh"
    for folder in (commands, script.parent, tmp_path / "out" / "example" / "model"):
        folder.mkdir(parents=True)
    (tmp_path / "out" / "example" / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "out" / "example" / "prompts.jsonl").touch()
    script.write_bytes((ROOT / "examples" / "reverse" / "run.sh").read_bytes())
    (commands / "vime").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (commands / "vime").chmod(0o755)
    done = subprocess.run(["bash", script, tmp_path / "out"], check=True, capture_output=True, text=True)
    command, *arguments = done.stdout.splitlines()
    assert command == "train"
    return parse_settings(arguments)


def test_the_command_line_passes_every_check(tmp_path: Path) -> None:
    settings = settings_of_run_sh(tmp_path)
    validate(settings)
    assert settings.megatron_args == ()


def test_the_reward_can_be_imported(tmp_path: Path) -> None:
    settings = settings_of_run_sh(tmp_path)
    assert load_function("--custom-rm-path", str(settings.rollout.custom_rm_path)).__name__ == "exact_match"
