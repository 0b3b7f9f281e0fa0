"""--load-forge-rollout-data: stored samples in place of generated ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.debug.stored_generator import StoredGenerator
from pipeline.request_gate import RequestGate
from pipeline.sample_maker import MakerSettings, SampleMaker
from pipeline.serving_engines import ServingEngines
from storage.checks import EnqueueRequirements, check_enqueue
from storage.debug_samples import write_pt
from tests.pipeline.debug.test_stored import sample
from vime.errors import DataError, SampleError
from vime.rollout.no_reward import no_reward
from vime.rollout.sampling import SamplingSettings
from vime.utils.types import Sample


def stored_run(folder: Path, num_groups: int = 2) -> str:
    """Two files of groups of two; rewards are the samples' numbers, and tell them apart."""
    for rollout_id in range(2):
        first = 2 * num_groups * rollout_id
        samples = [sample(first + number) for number in range(2 * num_groups)]
        for each in samples:
            each.version_spans, each.rollout_topk_token_ids = (
                [(7, 0, 2)],
                np.tile(np.arange(1, 4, dtype=np.int32), (2, 1)),
            )
            each.rollout_topk_log_probs = np.full((2, 3), -2.0, np.float32)
        write_pt(folder / f"{rollout_id}.pt", rollout_id, samples)
    return str(folder / "{rollout_id}.pt")


async def made(generator: StoredGenerator, group: int, member: int) -> Sample:
    gate = RequestGate(ServingEngines([]))
    gate.resume(1)
    asked = Sample(group_index=group, index=2 * group + member, prompt="of the run", metadata={"of": "the prompt"})
    maker = SampleMaker(MakerSettings(SamplingSettings(8), 1.0, None, True), gate, generator, no_reward, None)
    (found,) = await maker.make(asked)
    return found


async def test_each_place_in_the_queue_gets_the_stored_sample_of_the_same_place(tmp_path: Path) -> None:
    generator = StoredGenerator(stored_run(tmp_path), batch_size=2, group_size=2)
    places = [(group, member) for group in range(4) for member in range(2)]
    found = [await made(generator, *place) for place in places]
    assert [each.reward for each in found] == [float(number) for number in range(8)]
    assert all(each.prompt == "of the run" and each.metadata == {"of": "the prompt"} for each in found)
    assert all(each.tokens == [1, 2, 3] and each.rollout_log_probs == [-0.5, -0.25] for each in found)
    assert all(each.version_spans == [(0, 0, 2)] for each in found), "of no version that this run has published"
    check_enqueue(found, EnqueueRequirements(sc_top_k=3))


async def test_groups_of_a_smaller_file_come_round_again(tmp_path: Path) -> None:
    generator = StoredGenerator(stored_run(tmp_path), batch_size=3, group_size=2)
    assert [(await made(generator, group, 0)).reward for group in range(4)] == [0.0, 2.0, 0.0, 4.0]


async def test_what_can_t_take_the_place_of_a_sample_is_refused_by_name(tmp_path: Path) -> None:
    template = stored_run(tmp_path)
    with pytest.raises(DataError, match=rf"{FLAG} .*0.pt: group 0 has 2 samples, allowed: 4"):
        StoredGenerator(template, batch_size=2, group_size=4)
    with pytest.raises(DataError, match=r"absent\.pt"):
        StoredGenerator(str(tmp_path / "absent.pt"), batch_size=2, group_size=2)
    unfinished = sample(0)
    unfinished.status = Sample.Status.ABORTED
    write_pt(tmp_path / "open.pt", 0, [unfinished, sample(1)])
    generator = StoredGenerator(str(tmp_path / "open.pt"), batch_size=1, group_size=2)
    with pytest.raises(SampleError, match=r"open.pt: sample 0 is aborted, allowed: completed or truncated"):
        await made(generator, 0, 0)


FLAG = "--load-forge-rollout-data"
