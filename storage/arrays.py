"""Arrays and numbers of NumPy, images of Pillow and tensors of torch, to and from msgpack, without loss.

torch is not imported for a value that is no tensor.
"""

from __future__ import annotations

import importlib
import io
import sys
from typing import Any

import msgspec
import numpy as np
import PIL.Image

from vime.errors import SampleError

KINDS = "biufc"
"""Array kinds that can be stored: bool, signed and unsigned int, float, complex."""
MAX_ITEM_BYTES = {"f": 8, "c": 16}
"""Wider ones differ between machines."""
IMAGE_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""Pixel formats that PNG keeps bit by bit."""


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """dtype (image: mode), shape, raw bytes (image: a PNG file)."""

    dtype: str
    shape: list[int]
    data: memoryview


def unstorable(message: str, next_step: str) -> SampleError:
    """The error for a value that would not come back as it was."""
    return SampleError(message, next_step=next_step, reason="unstorable")


def pack_array(array: np.ndarray[Any, Any], path: str) -> bytes:
    """A NumPy array; a big-endian one comes back little-endian. Raises `SampleError` naming `path`."""
    dtype = array.dtype
    if dtype.kind not in KINDS or dtype.itemsize > MAX_ITEM_BYTES.get(dtype.kind, 8):
        raise unstorable(
            f"{path}: an array of dtype {dtype} can't be stored; allowed: bool, int, float and complex up to "
            "complex128.",
            "Convert it, for example with x.tolist() or x.astype(float).",
        )
    little = np.ascontiguousarray(array, dtype.newbyteorder("<"))
    return _encode(little.dtype.str, array.shape, little.reshape(-1).view(np.uint8).data)


def unpack_array(data: memoryview) -> np.ndarray[Any, Any]:
    """Inverse of `pack_array`; the array can be written to."""
    stored = _decode(data)
    return np.frombuffer(stored.data, np.dtype(stored.dtype)).reshape(stored.shape).copy()


def unpack_scalar(data: memoryview) -> np.generic:
    """A NumPy number that was packed as an array without axes."""
    scalar: Any = unpack_array(data)
    number: np.generic = scalar[()]
    return number


def pack_image(image: PIL.Image.Image, path: str) -> bytes:
    """A Pillow image as PNG: pixels, mode, palette and transparency, no other metadata. Raises `SampleError`."""
    if image.mode not in IMAGE_MODES:
        raise unstorable(
            f"{path}: an image of mode {image.mode} can't be stored without loss; allowed: {', '.join(IMAGE_MODES)}.",
            "Convert it, for example with image.convert('RGB'), or store np.asarray(image).",
        )
    most = PIL.Image.MAX_IMAGE_PIXELS
    if most is not None and image.width * image.height > most:
        raise unstorable(
            f"{path}: an image of {image.width} x {image.height} pixels can't be stored; allowed: {most} pixels, which "
            "Pillow reads.",
            "Make it smaller, or store np.asarray(image).",
        )
    file = io.BytesIO()
    try:
        image.save(file, "PNG", compress_level=1)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise unstorable(
            f"{path}: an image of {image.width} x {image.height} pixels can't be stored: {error}.",
            "Check the image's file; store np.asarray(image) to keep what is readable.",
        ) from error
    return _encode(image.mode, image.size, file.getbuffer())


def unpack_image(data: memoryview) -> PIL.Image.Image:
    """Inverse of `pack_image`."""
    with PIL.Image.open(io.BytesIO(_decode(data).data), formats=["PNG"]) as image:
        return image.copy()


def is_tensor(value: object) -> bool:
    """Whether this is a plain tensor of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) is torch.Tensor


def pack_tensor(tensor: Any, path: str) -> bytes:
    """A dense tensor, without its device and its gradient. Raises `SampleError` naming `path`."""
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise unstorable(
            f"{path}: a tensor of layout {tensor.layout} on device {tensor.device} can't be stored; allowed: a dense "
            "one with data.",
            "Convert it, for example with x.to_dense().",
        )
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _encode(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw.data)


def unpack_tensor(data: memoryview) -> Any:
    """Inverse of `pack_tensor`; imports torch."""
    torch = importlib.import_module("torch")
    stored = _decode(data)
    tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    if tensor.numel():
        tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(np.frombuffer(stored.data, np.uint8).copy()))
    return tensor


def _encode(dtype: str, shape: tuple[int, ...], data: memoryview) -> bytes:
    return msgspec.msgpack.encode(_Stored(dtype, list(shape), data))


def _decode(data: memoryview) -> _Stored:
    return msgspec.msgpack.decode(data, type=_Stored)
