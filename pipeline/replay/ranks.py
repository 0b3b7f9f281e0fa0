"""Starts the rank processes of a replay and waits for them; none outlives the call."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import msgspec

from pipeline.replay.job import RankError, error_path, log_path
from vime import errors
from vime.backends.vllm_utils.startup_log import last_lines
from vime.errors import RunFailedError, StalledError, VimeError

PROGRAM = "pipeline.replay.rank"
POLL_S = 0.05
END_S = 10.0
"""How long the other ranks may take to tell what ended them, after the first has ended."""


def run_ranks(scratch: Path, world_size: int, program: str = PROGRAM, *, patience_s: float) -> None:
    """Run all ranks of the job in `scratch` to their end; `program` is the module of one.

    Raises what a rank raised, `RunFailedError` with its last log lines when it died without a word, and `StalledError`
    when no rank has written a result or a log line for `patience_s` seconds.
    """
    ranks = [subprocess.Popen([sys.executable, "-m", program, str(scratch), str(rank)]) for rank in range(world_size)]
    written, since = _written(scratch), time.monotonic()
    try:
        while all(rank.poll() is None for rank in ranks) or _all_well(ranks):
            if all(rank.poll() is not None for rank in ranks):
                return
            time.sleep(POLL_S)
            if time.monotonic() - since > patience_s:
                now = _written(scratch)
                if now == written:
                    raise _stalled(scratch, [rank.poll() is None for rank in ranks], patience_s)
                written, since = now, time.monotonic()
        deadline = time.monotonic() + END_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        raise _failure(scratch, [rank.poll() for rank in ranks])
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _written(scratch: Path) -> dict[Path, int]:
    """Sizes of what the ranks write, which grow as they get on."""
    files = [path for folder in ("logs", "training_log") for path in (scratch / folder).glob("*")]
    return {path: path.stat().st_size for path in files}


def _stalled(scratch: Path, run_on: list[bool], patience_s: float) -> StalledError:
    rank = run_on.index(True)
    log = log_path(scratch, rank)
    shown = "".join(f"\n  | {line}" for line in last_lines(log))
    return StalledError(
        f"Rank {rank} of the replay has written nothing for {patience_s:g} s, which is the run's --stall-timeout."
        f" Last lines of {log}:{shown}",
        next_step="Raise it for the replay: --settings with stall_timeout under [queue].",
    )


def _all_well(ranks: list[subprocess.Popen[bytes]]) -> bool:
    """Whether no rank has failed."""
    return all(rank.poll() in (None, 0) for rank in ranks)


def _failure(scratch: Path, statuses: list[int | None]) -> VimeError:
    """What the first rank that told a reason told; else how the first one that died ended."""
    for rank in range(len(statuses)):
        path = error_path(scratch, rank)
        if path.exists():
            told = msgspec.json.decode(path.read_bytes(), type=RankError)
            kind = vars(errors).get(told.kind, VimeError)
            error: VimeError = kind(told.message, next_step=told.next_step)
            return error
    rank = next(rank for rank, status in enumerate(statuses) if status)
    shown = "".join(f"\n  | {line}" for line in last_lines(log_path(scratch, rank)))
    return RunFailedError(
        f"Rank {rank} of the replay ended with status {statuses[rank]}.{shown}",
        next_step="Add --scratch DIR to keep the logs.",
    )
