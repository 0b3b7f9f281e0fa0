"""Plain Python values to and from msgpack, exactly.

Allowed: None, bool, int of any size, float (NaN and infinities too), str, bytes, list, tuple, and dict with str or
64-bit int keys. Types are compared exactly: a subclass would come back as its base.
"""

from __future__ import annotations

from typing import Any

import msgspec

from vime.errors import SampleError

MAX_DEPTH = 100
_TUPLE, _BIG_INT = 1, 2
_ALLOWED = "allowed: None, bool, int, float, str, bytes, list, tuple, dict with str or int keys"
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
    raise msgspec.ValidationError(f"unknown msgpack extension {code}")


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
        if id(value) in parents:
            raise SampleError(f"{path}: the value contains itself.", next_step="Break the cycle before storing it.")
        if len(parents) >= MAX_DEPTH:
            raise SampleError(f"{path}: nested deeper than {MAX_DEPTH} levels.", next_step="Flatten the value.")
        inner = (*parents, id(value))
        if isinstance(value, dict):
            return {_check_key(key, path): _pack(item, f"{path}.{key}", inner) for key, item in value.items()}
        items = [_pack(item, f"{path}[{position}]", inner) for position, item in enumerate(value)]
        return items if kind is list else msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode(items))
    raise SampleError(
        f"{path}: a value of type {kind.__module__}.{kind.__qualname__} can't be stored; {_ALLOWED}.",
        next_step="Convert it first, for example with float(x), x.tolist() or str(x).",
    )


def _pack_int(value: int) -> Any:
    if value in _INT64:
        return value
    return msgspec.msgpack.Ext(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _check_text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SampleError(
            f"{path}: character {error.start} of the text is an unpaired surrogate.",
            next_step="Decode the text with errors='replace' before storing it.",
        ) from error
    return text


def _check_key(key: object, path: str) -> str | int:
    if type(key) is str:
        return _check_text(key, f"{path} (a key)")
    if type(key) is int and key in _INT64:
        return key
    raise SampleError(
        f"{path}: a dict key of type {type(key).__name__} can't be stored; allowed: str, 64-bit int.",
        next_step="Turn the key into a string.",
    )
