"""What an engine returns lands in the sample, also when an abort cuts the response in two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.pipeline.stream_parts import CharTokenizer
from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import SampleColumns, Sampling
from vime.errors import GenerationAborted
from vime.rollout.generate import GenerateSettings, SampleGenerator
from vime.utils.types import Sample

ALL = SampleColumns(num_candidates=3, routes=True, nucleus=True)
SETTINGS = GenerateSettings(False, columns=ALL)
SAMPLING = Sampling(40, 1.0, top_p=0.9)


@pytest.fixture
def engine() -> Iterator[StandinEngine]:
    with StandinEngine(vocab_size=200) as engine:
        yield engine


async def generate(
    engine: StandinEngine, sample: Sample, sampling: Sampling = SAMPLING, *, evaluation: bool = False
) -> Sample:
    async with EngineClient(engine.address) as client:
        generator = SampleGenerator(CharTokenizer(), SETTINGS)
        await generator.generate(client, sample, sampling, cache_salt=None, evaluation=evaluation)
    return sample


def fresh() -> Sample:
    return Sample(group_index=1, index=2, prompt="12+34=")


async def aborted_after(engine: StandinEngine, num_tokens: int) -> Sample:
    """A sample whose request the engine ended after so many tokens."""
    sample = fresh()
    engine.faults.num_tokens_before_abort = num_tokens
    with pytest.raises(GenerationAborted, match=f"after {num_tokens} tokens"):
        await generate(engine, sample)
    engine.faults.num_tokens_before_abort = None
    return sample


def as_arrays(sample: Sample) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(value)
        for name, value in vars(sample).items()
        if name in ("tokens", "rollout_log_probs", "loss_mask", "version_spans")
        or name.startswith(("rollout_t", "rollout_rou"))
    }


async def test_every_column_has_a_row_for_every_token(engine: StandinEngine) -> None:
    sample = await generate(engine, fresh())
    assert (sample.status, sample.response_length) == (Sample.Status.TRUNCATED, 40)
    assert len(sample.rollout_log_probs or []) == 40
    assert sample.rollout_topk_token_ids is not None
    assert sample.rollout_topk_log_probs is not None
    assert sample.rollout_topk_token_ids.shape == sample.rollout_topk_log_probs.shape == (40, 3)
    assert sample.rollout_top_p_token_offsets is not None
    assert len(sample.rollout_top_p_token_offsets) == 41
    assert np.shape(sample.rollout_routed_experts) == (len(sample.tokens) - 1, 2, 2)
    assert sample.version_spans == [(0, 0, 40)]
    assert sample.prefix_cache_info.total_prompt_tokens == len("12+34=")


async def test_evaluation_asks_for_no_columns(engine: StandinEngine) -> None:
    sample = await generate(engine, fresh(), Sampling(8), evaluation=True)
    assert (sample.rollout_topk_token_ids, sample.rollout_top_p_token_ids, sample.rollout_routed_experts) == (
        None, None, None
    )  # fmt: skip


@pytest.mark.parametrize("num_tokens", [1, 7, 39])
async def test_a_continued_response_is_the_one_that_was_never_aborted(engine: StandinEngine, num_tokens: int) -> None:
    whole = await generate(engine, fresh())
    sample = await aborted_after(engine, num_tokens)
    assert (sample.status, sample.response_length) == (Sample.Status.ABORTED, num_tokens)
    await generate(engine, sample)
    assert sample.response == whole.response
    assert sample.weight_versions == ["0", "0"]
    for name, value in as_arrays(whole).items():
        np.testing.assert_array_equal(as_arrays(sample)[name], value, err_msg=name)


async def test_an_abort_before_the_first_token_leaves_the_sample_to_start_again(engine: StandinEngine) -> None:
    whole = await generate(engine, fresh())
    sample = await aborted_after(engine, 0)
    await generate(engine, sample)
    for name, value in as_arrays(whole).items():
        np.testing.assert_array_equal(as_arrays(sample)[name], value, err_msg=name)


async def test_parts_of_a_response_keep_the_version_that_made_them(engine: StandinEngine) -> None:
    sample = await aborted_after(engine, 5)
    engine.version = "7"
    await generate(engine, sample)
    assert sample.version_spans == [(0, 0, 5), (7, 5, 40)]


async def test_a_sample_without_room_for_more_is_truncated_without_a_request(engine: StandinEngine) -> None:
    sample = await aborted_after(engine, 5)
    await generate(engine, sample, replace(SAMPLING, max_tokens=5))
    assert (sample.status, sample.response_length) == (Sample.Status.TRUNCATED, 5)
