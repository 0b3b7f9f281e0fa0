"""Media of prompts: placeholders in the chat, parts in the request, and what the model got in the sample."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import MediaPart, SampleColumns
from vime.errors import EngineError, GenerationAborted, SampleError
from vime.rollout.generate import GenerateSettings, SampleGenerator
from vime.rollout.media import media_parts, with_media
from vime.rollout.sampling import SamplingSettings
from vime.utils.types import Sample

MARK = 99
URL = "data:image/png;base64,AAAA"
SAMPLING = SamplingSettings(6, 1.0)


class PartTokenizer:
    """A byte a token; a medium is one token of its own."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:  # noqa: ARG002
        return [MARK if char == "\x00" else ord(char) % 90 for char in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:  # noqa: ARG002
        return "".join(chr(40 + token) for token in token_ids)

    def apply_chat_template(self, conversation: list[dict[str, Any]], **_: Any) -> str:
        parts = [part for message in conversation for part in message["content"]]
        return "".join(part["text"] if part["type"] == "text" else "\x00" for part in parts)


@pytest.fixture
def engine() -> Iterator[StandinEngine]:
    with StandinEngine(vocab_size=120) as engine:
        engine.media_token = MARK
        yield engine


async def generate(engine: StandinEngine, sample: Sample, settings: GenerateSettings) -> None:
    async with EngineClient(engine.address) as client:
        await SampleGenerator(PartTokenizer(), settings).generate(client, sample, SAMPLING, cache_salt=None)


def asked(prompt: Any = "a<image>b", **inputs: Any) -> Sample:
    return Sample(group_index=1, index=2, prompt=prompt, multimodal_inputs={"image": [URL], **inputs})


async def test_a_sample_has_the_prompt_that_the_model_got_with_its_media(engine: StandinEngine) -> None:
    sample = asked()
    await generate(engine, sample, GenerateSettings(True))
    assert engine.media == [URL]
    assert sample.tokens[: sample.prompt_length] == [ord("a") % 90, MARK, MARK, MARK, ord("b") % 90]
    assert sample.response_length == 6
    for stop in range(5, 11):
        assert sample.tokens[stop] == engine.next_token(sample.tokens[:stop], engine.weights_digest)


async def test_a_response_that_was_cut_goes_on_after_the_same_media(engine: StandinEngine) -> None:
    whole, cut = asked(), asked()
    await generate(engine, whole, GenerateSettings(True))
    engine.faults.num_tokens_before_abort = 2
    with pytest.raises(GenerationAborted, match="after 2 tokens"):
        await generate(engine, cut, GenerateSettings(True))
    engine.faults.num_tokens_before_abort = None
    await generate(engine, cut, GenerateSettings(True))
    assert engine.media == [URL] * 3
    assert (cut.tokens, cut.rollout_log_probs) == (whole.tokens, whole.rollout_log_probs)
    assert cut.response_length == 6


async def test_columns_of_a_prompt_with_media_are_refused(engine: StandinEngine) -> None:
    with pytest.raises(EngineError, match=r"returns no SampleColumns\(num_candidates=3.* of prompts with media"):
        await generate(engine, asked(), GenerateSettings(True, columns=SampleColumns(num_candidates=3)))


async def test_media_need_the_models_own_placeholders(engine: StandinEngine) -> None:
    with pytest.raises(SampleError, match="sample 2 of group 1 has media, allowed: text") as refused:
        await generate(engine, asked(), GenerateSettings(False))
    assert "--apply-chat-template" in str(refused.value.next_step)


@pytest.mark.parametrize(
    ("prompt", "contents"),
    [
        ("a<image>b<image>", [["text a", "image", "text b", "image"]]),
        ("ab", [["image", "image", "text ab"]]),
        (
            [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
            [["text s"], ["image", "image", "text q"]],
        ),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}], [["image", "image"]]),
    ],
)
def test_media_have_their_place_in_the_chat(prompt: Any, contents: list[list[str]]) -> None:
    chat = with_media(prompt, {"image": [URL, URL]})
    shown = [
        [f"text {part['text']}" if part["type"] == "text" else part["type"] for part in m["content"]] for m in chat
    ]
    assert shown == contents


def test_a_prompt_that_names_other_media_than_there_are_is_refused() -> None:
    with pytest.raises(SampleError, match="names 1 media of kind image, and the record has 2"):
        with_media("<image>", {"image": [URL, URL]})
    with pytest.raises(SampleError, match="names 1 media of kind video, and the record has 0"):
        with_media("<image><video>", {"image": [URL]})


def test_every_form_of_an_image_reaches_the_engine_whole(tmp_path: Path) -> None:
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    image = PIL.Image.fromarray(pixels)
    path = tmp_path / "a.png"
    image.save(path)
    forms = [
        image,
        pixels,
        str(path),
        path.read_bytes(),
        {"bytes": None, "path": str(path)},
        {"bytes": path.read_bytes()},
    ]
    for part in media_parts({"image": forms}):
        assert part.kind == "image"
        content = base64.b64decode(part.url.partition(",")[2])
        assert np.array_equal(np.asarray(PIL.Image.open(io.BytesIO(content))), pixels)
    assert media_parts({"video": ["https://host/a.mp4"]}) == (MediaPart("video", "https://host/a.mp4"),)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"picture": [URL]}, "media of kind 'picture', allowed: image, audio, video"),
        ({"image": ["/absent.png"]}, "the image /absent.png can't be read: No such file"),
        ({"audio": [np.zeros(3)]}, "an audio of type ndarray, allowed: a URL, a path, bytes"),
    ],
)
def test_what_no_engine_takes_is_refused(inputs: Any, said: str) -> None:
    with pytest.raises(SampleError, match=said):
        media_parts(inputs)
