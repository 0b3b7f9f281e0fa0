"""Values of a sample to and from msgpack, exactly.

Allowed: None, bool, int of any size, float (NaN and infinities too), str, bytes, list, tuple, dict with str or 64-bit
int keys, NumPy arrays and numbers, Pillow images, and torch tensors. Types are compared exactly: a subclass would come
back as its base; only images may be of any class of Pillow, and come back as plain ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import PIL.Image

from storage import arrays
from storage.arrays import unstorable

MAX_DEPTH = 100
_TUPLE, _BIG_INT, _ARRAY, _SCALAR, _IMAGE, _TENSOR = 1, 2, 3, 4, 5, 6
_ALLOWED = (
    "allowed: None, bool, int, float, str, bytes, list, tuple, dict with str or int keys, NumPy array or number, "
    "Pillow image, torch tensor"
)
_INT64 = range(-(2**63), 2**63)


def pack(value: object, path: str) -> Any:
    """`value` as something that msgspec writes to msgpack without loss.

    Raises `SampleError` naming the path (`metadata.tools[2]`) of a value of another type, a cycle, nesting deeper
    than `MAX_DEPTH` or text that is not valid Unicode.
    """
    return _pack(value, path, ())


def unpack_extension(code: int, data: memoryview) -> Any:
    """`ext_hook` of msgspec decoders for what `pack` wrote."""
    if code == _TUPLE:
        return tuple(_decoder.decode(data))
    if code == _BIG_INT:
        return int.from_bytes(data, "little", signed=True)
    if code not in _UNPACK:
        raise msgspec.ValidationError(f"unknown msgpack extension {code}")
    try:
        return _UNPACK[code](data)
    except (ValueError, TypeError, AttributeError, RuntimeError, OSError) as error:
        raise msgspec.ValidationError(f"a damaged value: {error}") from error


_UNPACK: dict[int, Callable[[memoryview], Any]] = {
    _ARRAY: arrays.unpack_array,
    _SCALAR: arrays.unpack_scalar,
    _IMAGE: arrays.unpack_image,
    _TENSOR: arrays.unpack_tensor,
}


_decoder = msgspec.msgpack.Decoder(ext_hook=unpack_extension)


def _pack(value: object, path: str, parents: tuple[int, ...]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float, bytes):
        return value
    if kind is int:
        return _pack_int(value)  # type: ignore[arg-type]
    if kind is str:
        return _check_text(value, path)  # type: ignore[arg-type]
    if isinstance(value, (list, tuple, dict)) and kind in (list, tuple, dict):
        return _pack_container(value, path, parents)
    if isinstance(value, np.ndarray) and kind is np.ndarray:
        return msgspec.msgpack.Ext(_ARRAY, arrays.pack_array(value, path))
    if isinstance(value, np.generic) and value.dtype.kind in arrays.KINDS:
        return msgspec.msgpack.Ext(_SCALAR, arrays.pack_array(np.asarray(value), path))
    if isinstance(value, PIL.Image.Image):
        return msgspec.msgpack.Ext(_IMAGE, arrays.pack_image(value, path))
    if arrays.is_tensor(value):
        return msgspec.msgpack.Ext(_TENSOR, arrays.pack_tensor(value, path))
    raise unstorable(
        f"{path}: a value of type {kind.__module__}.{kind.__qualname__} can't be stored; {_ALLOWED}.",
        "Convert it first, for example with float(x), dict(x) or str(x).",
    )


def _pack_container(value: list[Any] | tuple[Any, ...] | dict[Any, Any], path: str, parents: tuple[int, ...]) -> Any:
    if id(value) in parents:
        raise unstorable(f"{path}: the value contains itself.", "Break the cycle before storing it.")
    if len(parents) >= MAX_DEPTH:
        raise unstorable(f"{path}: nested deeper than {MAX_DEPTH} levels.", "Flatten the value.")
    inner = (*parents, id(value))
    if isinstance(value, dict):
        return {_check_key(key, path): _pack(item, f"{path}.{key}", inner) for key, item in value.items()}
    items = [_pack(item, f"{path}[{position}]", inner) for position, item in enumerate(value)]
    return items if isinstance(value, list) else msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode(items))


def _pack_int(value: int) -> Any:
    if value in _INT64:
        return value
    return msgspec.msgpack.Ext(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _check_text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise unstorable(
            f"{path}: character {error.start} of the text is an unpaired surrogate.",
            "Decode the text with errors='replace' before storing it.",
        ) from error
    return text


def _check_key(key: object, path: str) -> str | int:
    if type(key) is str:
        return _check_text(key, f"{path} (a key)")
    if type(key) is int and key in _INT64:
        return key
    raise unstorable(
        f"{path}: a dict key of type {type(key).__name__} can't be stored; allowed: str, 64-bit int.",
        "Turn the key into a string.",
    )
