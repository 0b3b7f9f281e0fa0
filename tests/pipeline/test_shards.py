"""What a rank packs is what the groups hold, sample by sample."""

import numpy as np

from pipeline.planner import BatchPlan, PlannedGroup, PlannedSample, StepPlan
from pipeline.shards import Columns, pack_step, totals
from storage.refs import PoolRef

REF = PoolRef("r", "p", "s", 1, "c", 1, "sha256", 0, 0, "d", 4, 100)
LENGTHS = {(0, 0): (5, 2), (0, 1): (4, 3), (1, 0): (3, 1), (1, 1): (6, 4)}


def plan(ranks: list[list[list[int]]]) -> BatchPlan:
    samples = [
        PlannedSample(group, member, 10 * group + member, total, response, 0.5 + group, float(response), 1.0, 0, False)
        for (group, member), (total, response) in LENGTHS.items()
    ]
    groups = [PlannedGroup(number, 100 + number, REF) for number in range(2)]
    return BatchPlan(1, "b", 0, 1, groups, samples, [StepPlan(4, 10, ranks)])


def columns() -> dict[int, Columns]:
    result: dict[int, Columns] = {}
    for group in range(2):
        totals_, responses = zip(*(lengths for (owner, _), lengths in LENGTHS.items() if owner == group), strict=True)
        result[group] = {
            "tokens": np.arange(sum(totals_), dtype=np.int32) + 100 * group,
            "loss_mask": np.arange(sum(responses), dtype=np.uint8) % 2,
            "sampler_log_probs": -np.arange(sum(responses), dtype=np.float32) - 10 * group,
        }
    return result


def test_rows_of_each_sample_come_from_its_place_in_its_group() -> None:
    batch = plan([[[3, 0]]])
    (packed,) = pack_step(batch, batch.steps[0], 0, columns())
    assert packed.tokens.tolist() == [103, 104, 105, 106, 107, 108, 0, 1, 2, 3, 4]
    assert packed.cu_seqlens.tolist() == [0, 6, 11]
    assert packed.response_lengths.tolist() == [4, 2]
    assert packed.sampler_log_probs.tolist() == [-11, -12, -13, -14, 0, -1]
    assert packed.loss_mask.tolist() == [1, 0, 1, 0, 0, 1]
    assert packed.advantages.tolist() == [1.5, 0.5]
    assert packed.sample_indices.tolist() == [11, 0]


def test_an_empty_microbatch_is_a_masked_copy_that_adds_nothing() -> None:
    batch = plan([[[1], []], [[2], [0, 3]]])
    real, filler = pack_step(batch, batch.steps[0], 0, columns())
    assert filler.tokens.tolist() == real.tokens.tolist()
    assert filler.loss_mask.tolist() == [0, 0, 0]
    assert filler.advantages.tolist() == [0.0]


def test_an_empty_microbatch_is_filled_with_the_shortest_sample_of_its_rank() -> None:
    batch = plan([[[3], [0, 2], []], [[1], [], []]])
    *_, filler = pack_step(batch, batch.steps[0], 0, columns())
    assert filler.sample_indices.tolist() == [10]


def test_totals_of_the_step_are_those_of_the_plan() -> None:
    batch = plan([[[0, 1, 2, 3]]])
    assert (totals(batch.steps[0]).num_rollouts, totals(batch.steps[0]).num_trained_tokens) == (4, 10)
