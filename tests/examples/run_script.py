"""Running an example's run.sh: for real, or to see what it would tell vime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from vime.settings.groups import Settings
from vime.settings.parse import parse_settings

ROOT = Path(__file__).resolve().parents[2]


def settings_of(tmp_path: Path, name: str, model: str, config: dict[str, Any], *words: str) -> Settings:
    """Those of the command line of a copy of run.sh, whose `vime` records its arguments.

    `model` is the folder of the checkpoint in that of the run, `config` its config.json; `words` are added to the
    command line.
    """
    commands, folder = tmp_path / ".venv" / "bin", tmp_path / "out"
    for made in (commands, folder / model, tmp_path / "examples" / name):
        made.mkdir(parents=True)
    (folder / model / "config.json").write_text(json.dumps(config))
    (folder / "example").mkdir(exist_ok=True)
    (folder / "example" / "prompts.jsonl").touch()
    script = tmp_path / "examples" / name / "run.sh"
    script.write_bytes((ROOT / "examples" / name / "run.sh").read_bytes())
    (commands / "vime").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    # The judge is started in the background and has to name its address.
    (commands / "python").write_text(f'#!/bin/sh\necho http://127.0.0.1:1/judge > "{folder}/judge_address"\n')
    for command in ("vime", "python"):
        (commands / command).chmod(0o755)
    done = subprocess.run(["bash", script, folder, *words], check=True, capture_output=True, text=True)
    command, *arguments = done.stdout.splitlines()
    assert command == "train"
    return parse_settings(arguments)


def said_by(folder: Path, name: str, *words: str) -> str:
    """What the example prints when it runs in `folder` with `words` added to its command line."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(
        ["bash", ROOT / "examples" / name / "run.sh", folder, *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps_of(folder: Path, name: str, *words: str) -> list[dict[str, Any]]:
    """The metrics of such a run."""
    said_by(folder, name, *words)
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
