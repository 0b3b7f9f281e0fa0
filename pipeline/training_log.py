"""What the ranks say that they trained, for those who look into a run; the run itself doesn't read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from pipeline.planner import BatchPlan
from storage.files import append_durably
from storage.json_lines import read_json_lines


class TrainingLogEntry(msgspec.Struct, frozen=True):
    """One optimizer step of one rank, written after it was taken."""

    branch: str
    rollout_id: int
    step: int
    data_parallel_rank: int
    group_indices: list[int]
    sample_indices: list[int]


def log_step(path: Path, plan: BatchPlan, step: int, data_parallel_rank: int) -> None:
    """Append what one rank trained in one optimizer step, durably."""
    numbers = [number for microbatch in plan.steps[step].ranks[data_parallel_rank] for number in microbatch]
    samples = [plan.samples[number] for number in numbers]
    entry = TrainingLogEntry(
        branch=plan.branch,
        rollout_id=plan.rollout_id,
        step=step,
        data_parallel_rank=data_parallel_rank,
        group_indices=sorted({plan.groups[sample.group].group_index for sample in samples}),
        sample_indices=sorted(sample.sample_index for sample in samples),
    )
    append_durably(path, msgspec.json.encode(entry))


def read_training_logs(paths: Iterable[Path]) -> Iterator[TrainingLogEntry]:
    """What the ranks say that they trained, one entry for each rank that trains other samples than the rest.

    A torn last line is left out. Raises `StorageError` for a file or a line that can't be read.
    """
    seen: set[tuple[str, int, int, int]] = set()
    for path in paths:
        for entry in read_json_lines(path, TrainingLogEntry, "an entry of the training log"):
            key = (entry.branch, entry.rollout_id, entry.step, entry.data_parallel_rank)
            if key not in seen:
                seen.add(key)
                yield entry
