"""What each optimizer step of a rollout batch came to, exactly: what a replay is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from storage.files import append_durably
from vime.errors import CorruptDataError

Layout = dict[str, str | int]
"""What the last bits of a step depend on besides weights, samples and settings."""


class StepResult(msgspec.Struct, frozen=True):
    """One optimizer step."""

    metrics: dict[str, float]
    """Of the whole step, the same on all ranks."""
    sample_losses: dict[int, float] = {}
    """`Sample.index` -> its part of the loss, for the samples that the rank computed a loss of."""


class RolloutResult(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout batch on one rank."""

    branch: str
    rollout_id: int
    rank: int
    layout: Layout
    steps: list[StepResult]
    """Of the actor."""
    critic_steps: list[StepResult] = []
    parameters: dict[str, str]
    """Name of each parameter that the rank holds -> digest of its bytes after the last step."""


def results_path(root: Path, rank: int) -> Path:
    """Results of one rank in a run folder."""
    return root / "training_log" / f"results_rank_{rank}.jsonl"


def log_result(path: Path, result: RolloutResult) -> None:
    """Append a result, durably."""
    append_durably(path, msgspec.json.encode(result))


def read_results(root: Path, branch: str, rollouts: Iterable[int]) -> list[RolloutResult]:
    """Logged results of some rollouts of a branch, by rollout and rank; the last one where a rollout was repeated.

    A torn last line is left out. Raises `CorruptDataError` for another damaged line.
    """
    wanted = set(rollouts)
    found = {
        (result.rollout_id, result.rank): result
        for path in sorted((root / "training_log").glob("results_rank_*.jsonl"))
        for result in _lines(path)
        if result.branch == branch and result.rollout_id in wanted
    }
    return [found[key] for key in sorted(found)]


def _lines(path: Path) -> Iterator[RolloutResult]:
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            yield msgspec.json.decode(line, type=RolloutResult)
        except msgspec.MsgspecError as error:
            raise CorruptDataError(f"{path}:{number}: not a result: {error}.", next_step="Remove the line.") from error
