"""What an engine's log says about its start."""

from __future__ import annotations

import re
from pathlib import Path

_PHASES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("listening", re.compile(r"Application startup complete|Starting vLLM (API )?server")),
    ("warming up", re.compile(r"Warming up|KV cache size|init engine")),
    ("loading weights", re.compile(r"Starting to load model|Loading (safetensors|weights)")),
    ("building the model", re.compile(r"Initializing a V\d")),
    ("starting the engine process", re.compile(r"non-default args|Resolved architecture")),
)

IMPORTING = "importing vLLM"


def startup_phase(log_text: str) -> str:
    """The latest phase of a start that the log shows."""
    for phase, pattern in _PHASES:
        if pattern.search(log_text):
            return phase
    return IMPORTING


def last_lines(log_path: Path, num_lines: int = 20, max_bytes: int = 65536) -> list[str]:
    """The last non-empty lines of the log, none if it doesn't exist yet."""
    if not log_path.exists():
        return []
    with log_path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - max_bytes))
        lines = file.read().decode(errors="replace").splitlines()
    return [line for line in lines if line.strip()][-num_lines:]
