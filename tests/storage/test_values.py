"""Values of a sample come back as they were, or are refused with their path."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import PIL.Image
import pytest
import torch

from storage.values import pack, unpack_extension
from vime.errors import SampleError


def round_trip(value: object) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(pack(value, "x")), ext_hook=unpack_extension)


def image(mode: str, size: tuple[int, int] = (7, 5)) -> PIL.Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4)).astype(np.uint8)
    if mode == "I;16":
        return PIL.Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
    if mode in ("1", "P"):
        return PIL.Image.fromarray(noise[..., 0]).convert(mode)
    return PIL.Image.fromarray(np.squeeze(noise[..., : len(mode)]), mode)


@pytest.mark.parametrize("array", [np.array(3.5), np.zeros((0, 3), np.int8), np.arange(6).reshape(2, 3).T])
def test_arrays_without_axes_without_elements_and_out_of_order_come_back(array: np.ndarray[Any, Any]) -> None:
    found = round_trip(array)
    assert (found.dtype, found.shape, found.tolist()) == (array.dtype, array.shape, array.tolist())
    assert found.flags.writeable


def test_big_endian_arrays_come_back_with_the_same_numbers_in_little_endian() -> None:
    found = round_trip(np.arange(4, dtype=">i4"))
    assert (found.dtype.str, found.tolist()) == ("<i4", [0, 1, 2, 3])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_images_come_back_bit_by_bit(mode: str) -> None:
    found = round_trip({"images": [image(mode)]})["images"][0]
    assert type(found) is PIL.Image.Image
    assert found == image(mode)


def test_an_image_that_was_opened_from_a_file_comes_back_without_the_file() -> None:
    file = io.BytesIO()
    image("RGB").save(file, "JPEG")
    opened = PIL.Image.open(file)
    assert round_trip(opened).tobytes() == opened.tobytes()


def test_transparency_of_a_palette_comes_back() -> None:
    given = image("P")
    given.info["transparency"] = 3
    assert round_trip(given).convert("RGBA").tobytes() == given.convert("RGBA").tobytes()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor([True, False]),
        torch.ones(3).to(torch.float8_e4m3fn),
    ],
)
def test_tensors_come_back_with_their_type_and_shape(tensor: torch.Tensor) -> None:
    found = round_trip((tensor,))[0]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found.float(), tensor.float())


def truncated_image() -> PIL.Image.Image:
    file = io.BytesIO()
    image("RGB", (64, 64)).save(file, "JPEG")
    return PIL.Image.open(io.BytesIO(file.getvalue()[:-200]))


class Tagged(np.ndarray):  # type: ignore[type-arg]
    """A subclass, which would lose what it adds."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([object()]), "an array of dtype object can't be stored"),
        (np.array(["text"]), "an array of dtype <U4 can't be stored"),
        (np.array(["2026-11-30"], "datetime64[D]"), "an array of dtype datetime64"),
        (np.zeros(1, np.longdouble), "an array of dtype float128 can't be stored"),
        (np.zeros(2).view(Tagged), "a value of type test_values.Tagged can't be stored"),
        (PIL.Image.new("CMYK", (2, 2)), "an image of mode CMYK can't be stored without loss"),
        (PIL.Image.new("F", (2, 2)), "an image of mode F can't be stored without loss"),
        (PIL.Image.new("RGB", (0, 3)), "an image of 0 x 3 pixels can't be stored"),
        (truncated_image(), "an image of 64 x 64 pixels can't be stored: image file is truncated"),
        (torch.zeros(2, 2).to_sparse(), "a tensor of layout torch.sparse_coo on device cpu can't be stored"),
        (torch.zeros(2, device="meta"), "a tensor of layout torch.strided on device meta can't be stored"),
        (torch.nn.Parameter(torch.zeros(2)), "a value of type torch.nn.parameter.Parameter can't be stored"),
    ],
)
def test_what_would_not_come_back_is_refused_with_its_path(value: object, message: str) -> None:
    with pytest.raises(SampleError, match=rf"^media\[1\].pixels: {message}") as caught:
        pack([0, {"pixels": value}], "media")
    assert caught.value.reason == "unstorable"
    assert caught.value.next_step


def test_an_image_larger_than_pillow_reads_is_refused_before_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 34)
    with pytest.raises(SampleError, match="7 x 5 pixels can't be stored; allowed: 34 pixels"):
        pack(image("L"), "x")


@pytest.mark.parametrize("code", [3, 4, 5, 6, 99])
def test_damaged_extensions_are_validation_errors(code: int) -> None:
    data = msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode(["O", [2], b"abc"])))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, ext_hook=unpack_extension)


def test_an_image_in_another_format_than_png_is_not_opened() -> None:
    file = io.BytesIO()
    image("RGB").save(file, "BMP")
    data = msgspec.msgpack.encode(msgspec.msgpack.Ext(5, msgspec.msgpack.encode(["RGB", [7, 5], file.getvalue()])))
    with pytest.raises(msgspec.ValidationError, match="cannot identify image"):
        msgspec.msgpack.decode(data, ext_hook=unpack_extension)


def test_storing_plain_values_does_not_import_torch() -> None:
    script = "import sys, storage.columns, storage.checks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
