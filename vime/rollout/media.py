"""Media of a prompt (--multimodal-keys), as chat templates and engines take them."""

from __future__ import annotations

import base64
import io
import mimetypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import PIL.Image

from vime.backends.vllm_utils.protocol import MediaKind, MediaPart
from vime.errors import SampleError

KINDS = ("image", "audio", "video")
_URL = ("http://", "https://", "data:")
_MARKER = re.compile(f"<({'|'.join(KINDS)})>")

Chat = list[dict[str, Any]]


def media_parts(inputs: Mapping[str, Sequence[Any]]) -> tuple[MediaPart, ...]:
    """What an engine is sent of `Sample.multimodal_inputs`, kind by kind. Raises `SampleError` for what it can't take.

    An item is a URL, a path on this machine, encoded bytes, an image, an array of pixels (uint8 [H, W, 3] or [H, W]),
    or an object with one of these under `bytes` or `path`, as data sets of images store them.
    """
    unknown = [kind for kind in inputs if kind not in KINDS]
    if unknown:
        raise SampleError(
            f"media of kind {unknown[0]!r}, allowed: {', '.join(KINDS)}.", next_step="Correct --multimodal-keys."
        )
    return tuple(MediaPart(cast(MediaKind, kind), _url(kind, item)) for kind, items in inputs.items() for item in items)


def with_media(prompt: str | Chat, inputs: Mapping[str, Sequence[Any]]) -> Chat:
    """The prompt as a chat whose content has a part for each medium.

    `<image>`, `<audio>` and `<video>` in a text stand for the next medium of that kind. A prompt without any of these,
    and without parts of its own, has all its media before the first user's text. Raises `SampleError` when it names
    another number of them than there are.
    """
    chat: Chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    split = [{**message, "content": _parts(message.get("content"))} for message in chat]
    named = [part["type"] for message in split for part in message["content"] if part.get("type") != "text"]
    if not named:
        first = next((number for number, message in enumerate(split) if message.get("role") == "user"), 0)
        media = [{"type": kind} for kind, items in inputs.items() for _ in items]
        split[first] = {**split[first], "content": [*media, *split[first]["content"]]}
        return split
    counts = {kind: sum(name.removesuffix("_url") == kind for name in named) for kind in KINDS}
    wrong = [kind for kind in KINDS if counts[kind] != len(inputs.get(kind, ()))]
    if wrong:
        raise SampleError(
            f"the prompt names {counts[wrong[0]]} media of kind {wrong[0]}, and the record has "
            f"{len(inputs.get(wrong[0], ()))}.",
            next_step=f"Put one <{wrong[0]}> into the prompt for each.",
        )
    return split


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return content
    texts = _MARKER.split(str(content or ""))
    parts = [{"type": text} if number % 2 else {"type": "text", "text": text} for number, text in enumerate(texts)]
    return [part for part in parts if part.get("text") != ""]


def _url(kind: str, item: Any) -> str:
    if isinstance(item, Mapping):
        item = next((item[key] for key in ("bytes", "path") if item.get(key) is not None), None)
    if isinstance(item, str) and item.startswith(_URL):
        return item
    if isinstance(item, str | Path):
        return _read(kind, Path(item))
    if isinstance(item, bytes):
        return _data_url(f"{kind}/*", item)
    if kind == "image" and isinstance(item, np.ndarray) and item.dtype == np.uint8:
        item = PIL.Image.fromarray(item)
    if kind == "image" and isinstance(item, PIL.Image.Image):
        encoded = io.BytesIO()
        item.save(encoded, format="PNG")
        return _data_url("image/png", encoded.getvalue())
    raise SampleError(
        f"an {kind} of type {type(item).__name__}, allowed: a URL, a path, bytes, or for an image its pixels.",
        next_step="Store the media in such a form.",
    )


def _read(kind: str, path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SampleError(
            f"the {kind} {path} can't be read: {error.strerror}.", next_step="Give absolute paths, or URLs."
        ) from error
    return _data_url(mimetypes.guess_type(path.name)[0] or f"{kind}/*", content)


def _data_url(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"
