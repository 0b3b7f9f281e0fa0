"""--use-pytorch-profiler: traces of rollout batches on trainer ranks, in files that Perfetto opens."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.optional_records import OptionalRecords
from storage.files import make_folder


@dataclass(frozen=True)
class ProfileSettings:
    """Which rollout batches a rank traces, as Megatron's own flags say."""

    folder: Path
    rank: int
    batches: range = range(0)
    with_shapes: bool = False
    with_stacks: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace, folder: Path, rank: int) -> ProfileSettings:
        """From Megatron's arguments, whose steps are rollout batches here; rank 0 where they name none."""
        traces = args.use_pytorch_profiler and rank in (args.profile_ranks or [0])
        return cls(
            folder,
            rank,
            range(args.profile_step_start, args.profile_step_end) if traces else range(0),
            with_shapes=args.pytorch_profiler_collect_shapes,
            with_stacks=args.pytorch_profiler_collect_callstack,
        )


class StepProfile:
    """Traces what the calling thread does on CPU and GPU."""

    def __init__(self, settings: ProfileSettings, records: OptionalRecords) -> None:
        """A trace that can't be written is noted in `records`."""
        self._settings, self._records = settings, records

    @contextmanager
    def traced(self, rollout_id: int) -> Iterator[None]:
        """Trace the work of one rollout batch, if it is to be, into `rollout_<n>_rank_<r>.json.gz`."""
        settings = self._settings
        if rollout_id not in settings.batches:
            yield
            return
        import torch
        from torch.profiler import ProfilerActivity, profile

        wanted = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with profile(
            activities=wanted, record_shapes=settings.with_shapes, with_stack=settings.with_stacks
        ) as profiler:
            yield
        path = settings.folder / f"rollout_{rollout_id}_rank_{settings.rank}.json.gz"

        def write() -> None:
            make_folder(settings.folder)
            profiler.export_chrome_trace(str(path))

        self._records.write("profile", write)
