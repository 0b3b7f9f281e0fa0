"""What one trainer rank reads of a plan: only the groups that hold its samples, packed as the plan says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.planner import BatchPlan, PlannedSample, StepPlan
from storage.pool import Pool
from vime.data.batch import PackedMicrobatch, StepTotals

COLUMNS = ("tokens", "loss_mask", "sampler_log_probs")

Columns = Mapping[str, npt.NDArray[Any]]


def read_rank_groups(pool: Pool, plan: BatchPlan, rank: int) -> dict[int, Columns]:
    """Columns of each group that `rank` trains on, by the group's number in the plan."""
    numbers = {
        plan.samples[sample].group for step in plan.steps for microbatch in step.ranks[rank] for sample in microbatch
    }
    return {number: pool.read_columns(plan.groups[number].ref, COLUMNS) for number in sorted(numbers)}


def pack_step(plan: BatchPlan, step: StepPlan, rank: int, groups: Mapping[int, Columns]) -> list[PackedMicrobatch]:
    """The microbatches of `rank` in one optimizer step.

    An empty microbatch (there were fewer samples than would give each rank as many) is filled with a fully masked
    copy of the rank's shortest sample, so that all ranks take part in every collective.
    """
    offsets = group_offsets(plan)
    packed = []
    for microbatch in step.ranks[rank]:
        filler = not microbatch
        members = [plan.samples[number] for number in microbatch or _shortest_sample(plan, step, rank)]
        packed.append(_pack(members, groups, offsets, filler=filler))
    return packed


def totals(step: StepPlan) -> StepTotals:
    return StepTotals(num_rollouts=step.num_rollouts, num_trained_tokens=step.num_trained_tokens)


def group_offsets(plan: BatchPlan) -> dict[tuple[int, int], tuple[int, int]]:
    """(group, member) -> where its tokens and its response begin in the group's columns."""
    result: dict[tuple[int, int], tuple[int, int]] = {}
    token_start: dict[int, int] = {}
    response_start: dict[int, int] = {}
    for sample in sorted(plan.samples, key=lambda sample: (sample.group, sample.member)):
        tokens, responses = token_start.get(sample.group, 0), response_start.get(sample.group, 0)
        result[sample.group, sample.member] = (tokens, responses)
        token_start[sample.group] = tokens + sample.total_length
        response_start[sample.group] = responses + sample.response_length
    return result


def _shortest_sample(plan: BatchPlan, step: StepPlan, rank: int) -> list[int]:
    numbers = (number for microbatch in step.ranks[rank] for number in microbatch)
    return [min(numbers, key=lambda number: (plan.samples[number].total_length, number))]


def _pack(
    members: Sequence[PlannedSample],
    groups: Mapping[int, Columns],
    offsets: Mapping[tuple[int, int], tuple[int, int]],
    *,
    filler: bool,
) -> PackedMicrobatch:
    def rows(name: str, part: int, sample: PlannedSample) -> npt.NDArray[Any]:
        start = offsets[sample.group, sample.member][part]
        length = sample.total_length if part == 0 else sample.response_length
        return groups[sample.group][name][start : start + length]

    masks = [rows("loss_mask", 1, sample) for sample in members]
    return PackedMicrobatch(
        tokens=np.concatenate([rows("tokens", 0, sample) for sample in members]),
        cu_seqlens=np.cumsum([0, *(sample.total_length for sample in members)], dtype=np.int32),
        response_lengths=np.asarray([sample.response_length for sample in members], np.int32),
        loss_mask=np.concatenate([np.zeros_like(mask) for mask in masks] if filler else masks),
        sampler_log_probs=np.concatenate([rows("sampler_log_probs", 1, sample) for sample in members]),
        advantages=np.asarray([0.0 if filler else sample.advantage for sample in members], np.float32),
        mask_sums=np.asarray([sample.mask_sum for sample in members], np.float32),
        sample_indices=np.asarray([sample.sample_index for sample in members], np.int64),
    )
