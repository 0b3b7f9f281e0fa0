"""Records become samples to train on without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from storage.checks import EnqueueRequirements, check_sample
from tests.vime.rollout.test_conversation import PLAIN, Characters
from vime.errors import SampleError
from vime.rollout.sampling import SamplingSettings
from vime.rollout.supervised import RecordReader
from vime.utils.types import Sample

ANSWER = {"role": "assistant", "content": "yo"}


async def read(prompt: Any, label: Any = None, *, template: bool = False, **more: Any) -> Sample:
    sample = Sample(group_index=4, index=9, prompt=prompt, label=label, **more)
    reader = RecordReader(Characters(PLAIN), "qwen", apply_chat_template=template)
    await reader.generate(None, sample, SamplingSettings(1), cache_salt=None)
    return sample


async def test_a_conversation_is_a_sample_whose_response_begins_with_the_first_trained_token() -> None:
    sample = await read([{"role": "user", "content": "hi"}, ANSWER, {"role": "user", "content": "?"}, ANSWER])
    assert sample.response.startswith("yo\2\n")
    assert sample.loss_mask is not None
    assert (sum(sample.loss_mask), len(sample.loss_mask)) == (6, sample.response_length)
    assert sample.status is Sample.Status.COMPLETED
    check_sample(sample, EnqueueRequirements(sampled=False))


@pytest.mark.parametrize("template", [False, True])
async def test_text_is_continued_by_the_label(template: bool) -> None:
    sample = await read("2+2=", "4", template=template)
    prompt = "".join(map(chr, sample.tokens[: sample.prompt_length]))
    assert prompt == ("\1system\ndefault\2\n\1user\n2+2=\2\n\1assistant\n" if template else "2+2=")
    trained = [t for t, kept in zip(sample.tokens[sample.prompt_length :], sample.loss_mask or [], strict=True) if kept]
    assert "".join(map(chr, trained)) == "4\2"


async def test_the_label_is_the_answer_that_a_conversation_lacks() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert (await read(messages, "yo")).tokens == (await read([*messages, ANSWER])).tokens
    assert (await read([*messages, ANSWER], "ignored")).tokens == (await read([*messages, ANSWER])).tokens
    assert len(messages) == 1, "the record itself is left as it was"


async def test_a_conversation_without_a_trained_turn_is_refused() -> None:
    messages = [{"role": "user", "content": "hi"}, {**ANSWER, "step_loss_mask": 0}]
    with pytest.raises(SampleError, match=r"sample 9 of group 4: no token of the record is trained") as caught:
        await read(messages)
    assert caught.value.reason == "nothing_trained"


async def test_text_without_a_label_is_refused() -> None:
    with pytest.raises(SampleError, match=r"the prompt is text and the label None, allowed: text") as caught:
        await read("2+2=")
    assert caught.value.reason == "label"
