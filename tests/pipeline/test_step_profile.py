"""Traces of rollout batches, as Megatron's profiling flags ask for them."""

from __future__ import annotations

import gzip
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from pipeline.optional_records import OptionalRecords
from pipeline.step_profile import ProfileSettings, StepProfile


def settings(folder: Path, rank: int = 0, **changed: Any) -> ProfileSettings:
    flags = {
        "use_pytorch_profiler": True,
        "profile_ranks": [],
        "profile_step_start": 1,
        "profile_step_end": 3,
        "pytorch_profiler_collect_shapes": False,
        "pytorch_profiler_collect_callstack": False,
    }
    return ProfileSettings.of(Namespace(**{**flags, **changed}), folder, rank)


def run(asked: ProfileSettings, num_batches: int = 4) -> list[str]:
    profile = StepProfile(asked, OptionalRecords())
    for rollout_id in range(num_batches):
        with profile.traced(rollout_id):
            torch.ones(8, 8) @ torch.ones(8, 8)
    return sorted(path.name for path in asked.folder.glob("*"))


def test_the_asked_for_batches_are_traced_in_the_format_that_perfetto_opens(tmp_path: Path) -> None:
    names = run(settings(tmp_path / "profiles", pytorch_profiler_collect_shapes=True))
    assert names == ["rollout_1_rank_0.json.gz", "rollout_2_rank_0.json.gz"]
    with gzip.open(tmp_path / "profiles" / names[0]) as file:
        events = json.load(file)["traceEvents"]
    (product,) = [event for event in events if event.get("name") == "aten::mm"]
    assert product["ph"] == "X"
    assert {"ts", "dur", "pid", "tid"} <= product.keys()
    assert product["args"]["Input Dims"] == [[8, 8], [8, 8]]


def test_only_the_named_ranks_are_traced_and_the_first_when_none_is_named(tmp_path: Path) -> None:
    assert run(settings(tmp_path, rank=1)) == []
    assert run(settings(tmp_path, rank=0, profile_ranks=[1])) == []
    assert run(settings(tmp_path, rank=1, profile_ranks=[0, 1])) == [
        "rollout_1_rank_1.json.gz",
        "rollout_2_rank_1.json.gz",
    ]


def test_a_trace_that_can_not_be_written_costs_nothing_but_itself(tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("a file in the way")
    records = OptionalRecords()
    with StepProfile(settings(tmp_path / "profiles"), records).traced(1):
        torch.ones(8, 8) @ torch.ones(8, 8)
    (lacking,) = records.unwritten
    assert (lacking.record, lacking.num_batches) == ("profile", 1)
    assert "is a file, not a folder" in lacking.why


def test_nothing_is_traced_without_the_profiler(tmp_path: Path) -> None:
    assert run(settings(tmp_path, use_pytorch_profiler=False)) == []
