"""What an engine returns lands in the sample, also when an abort cuts the response in two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.pipeline.stream_parts import CharTokenizer
from tests.support.standin_engine import StandinEngine
from tests.support.tiny_models import build_tokenizer
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import GenerateRequest, GenerateResult, SampleColumns, VersionSpan
from vime.errors import GenerationAborted, SampleError
from vime.rollout.generate import GenerateSettings, SampleGenerator
from vime.rollout.sampling import SamplingSettings
from vime.utils.types import Sample

ALL = SampleColumns(num_candidates=3, routes=True, nucleus=True)
SETTINGS = GenerateSettings(False, columns=ALL)
SAMPLING = SamplingSettings(40, 1.0, top_p=0.9)


class Listening(EngineClient):
    """Keeps the requests that it sends."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.heard: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.heard.append(request)
        return await super().generate(request)


@pytest.fixture
def engine() -> Iterator[StandinEngine]:
    with StandinEngine(vocab_size=200) as engine:
        yield engine


async def generate(
    engine: StandinEngine, sample: Sample, sampling: SamplingSettings = SAMPLING, *, evaluation: bool = False
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
    sample = await generate(engine, fresh(), SamplingSettings(8), evaluation=True)
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


async def test_a_response_ends_where_the_context_does(engine: StandinEngine) -> None:
    sample = await generate(engine, fresh(), replace(SAMPLING, max_context_tokens=16))
    assert (sample.status, len(sample.tokens)) == (Sample.Status.TRUNCATED, 16)
    sample = await aborted_after(engine, 5)
    await generate(engine, sample, replace(SAMPLING, max_context_tokens=13))
    assert (sample.status, len(sample.tokens)) == (Sample.Status.TRUNCATED, 13)


async def test_a_prompt_that_fills_the_context_is_refused(engine: StandinEngine) -> None:
    with pytest.raises(SampleError, match="the prompt has 6 tokens, allowed: 5, for a context of 6") as error:
        await generate(engine, fresh(), replace(SAMPLING, max_context_tokens=6))
    assert error.value.reason == "prompt_too_long"


async def test_no_stop_token_comes_before_the_fewest_tokens_of_a_response(engine: StandinEngine) -> None:
    whole = await generate(engine, fresh())
    stop = whole.tokens[whole.prompt_length]
    sample = await generate(engine, fresh(), replace(SAMPLING, stop_token_ids=(stop,), min_response_tokens=20))
    assert sample.response_length >= 20
    assert stop not in sample.tokens[sample.prompt_length : sample.prompt_length + 20]


async def test_what_continues_a_response_is_asked_for_the_rest_of_its_limits(engine: StandinEngine) -> None:
    sample = await aborted_after(engine, 15)
    async with Listening(engine.address) as client:
        sampling = replace(SAMPLING, min_response_tokens=20)
        await SampleGenerator(CharTokenizer(), SETTINGS).generate(client, sample, sampling, cache_salt=None)
    assert [(request.sampling.min_tokens, request.sampling.max_tokens) for request in client.heard] == [(5, 25)]


async def test_a_repeated_generation_is_the_same_and_another_samples_is_not(engine: StandinEngine) -> None:
    seeded = replace(SAMPLING, seed=42)
    first, again = await generate(engine, fresh(), seeded), await generate(engine, fresh(), seeded)
    assert again.tokens == first.tokens
    assert (await generate(engine, Sample(group_index=1, index=3, prompt="12+34="), seeded)).tokens != first.tokens
    assert (await generate(engine, fresh(), replace(SAMPLING, seed=43))).tokens != first.tokens


async def test_what_continues_a_response_draws_other_numbers_than_its_beginning(engine: StandinEngine) -> None:
    sample = await aborted_after(engine, 5)
    async with Listening(engine.address) as client:
        for started in (fresh(), sample):
            sampling = replace(SAMPLING, seed=1)
            await SampleGenerator(CharTokenizer(), SETTINGS).generate(client, started, sampling, cache_salt=None)
    assert len({request.sampling.seed for request in client.heard}) == 2


@pytest.mark.parametrize(("skips", "text"), [(False, "ab<bos>c"), (True, "abc")])
async def test_special_tokens_inside_the_text_are_kept_unless_they_are_skipped(
    engine: StandinEngine, tmp_path: Path, skips: bool, text: str
) -> None:
    """The one that ends the response is no part of it."""
    tokenizer = build_tokenizer(tmp_path)
    told = tokenizer.encode("ab<bos>c<eos>", add_special_tokens=False)

    class Scripted(EngineClient):
        async def generate(self, request: GenerateRequest) -> GenerateResult:
            spans = [VersionSpan(1, 0, len(told))]
            return GenerateResult(request.request_id, told, [-0.5] * len(told), "stop", spans, 3, 0)

    sampling = SamplingSettings(40, skip_special_tokens=skips)
    sample = Sample(prompt="1+2=")
    async with Scripted(engine.address) as client:
        await SampleGenerator(tokenizer, GenerateSettings(False)).generate(client, sample, sampling, cache_salt=None)
    assert (sample.response, sample.response_length) == (text, 5)


async def test_a_sample_without_room_for_more_is_truncated_without_a_request(engine: StandinEngine) -> None:
    sample = await aborted_after(engine, 5)
    await generate(engine, sample, replace(SAMPLING, max_response_tokens=5))
    assert (sample.status, sample.response_length) == (Sample.Status.TRUNCATED, 5)
