"""Jobs of `vime train` of several ranks and several engines, and the same on stand-in engines."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu import stream

STANDIN_RUN = "tests.end_to_end.standin_run"


def scaled(load: stream.Load, size: int) -> stream.Load:
    """The load of so many trainers and engines: as many times the prompts in a step, as much in flight at an engine."""
    return dataclasses.replace(load, groups=load.groups * size)


def job_command(
    folder: Path, run: Path, load: stream.Load, gpus: int, ranks: int, flags: Mapping[str, object], *switches: str
) -> list[str]:
    """The stream's job with so many trainer ranks, and what is left of their number as engines; `flags` win."""
    given = {
        "--actor-num-gpus-per-node": ranks,
        "--rollout-num-gpus": ranks,
        "--rollout-queue-max-groups": 2 * load.groups + ranks * load.requests // load.group,
        **flags,
    }
    words = [str(word) for item in given.items() for word in item]
    return [*stream.train_command(folder, run, load, gpus), *words, *switches]


def on_standins(command: Sequence[str]) -> list[str]:
    """The same job whose engines are stand-ins; no trainer agrees with them, so nothing is compared at the start."""
    words = list(command)
    return [sys.executable, "-m", STANDIN_RUN, *words[words.index("train") + 1 :], "--parity-probes", "0"]
