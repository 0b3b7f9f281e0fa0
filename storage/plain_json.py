"""Any Python value as JSON, for evidence: nothing is refused, and what JSON can't hold is tagged, not lost."""

from __future__ import annotations

import base64
import dataclasses
import enum
import math
import reprlib
from typing import Any

import numpy as np

_INT64 = range(-(2**63), 2**63)
_MAX_DEPTH = 40
_MAX_REPR = 2000


def to_plain_json(value: object) -> Any:
    """`value` in JSON's types.

    Tagged as a one-key object: `{"$float": "nan"}`, `{"$int": "..."}`, `{"$bytes": base64}`, `{"$tuple": [...]}`,
    `{"$dict": [[key, value], ...]}` where keys are not all text, `{"$array": {dtype, shape, data: base64}}`, and,
    for what has no faithful form, `{"$repr": text, "type": name}`, `{"$cycle": depth}` or `{"$too_deep": text}`.
    """
    return _convert(value, ())


def _convert(value: object, parents: tuple[int, ...]) -> Any:
    if value is None or type(value) in (bool, str):
        return _text(value) if isinstance(value, str) else value
    if type(value) is int:
        return value if value in _INT64 else {"$int": str(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, enum.Enum):
        return _convert(value.value, parents)
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        return {"$array": _array(np.asarray(value))}
    if isinstance(value, dict | list | tuple) or _is_record(value):
        return _container(value, parents)
    return {"$repr": _repr(value), "type": f"{type(value).__module__}.{type(value).__qualname__}"}


def _container(value: Any, parents: tuple[int, ...]) -> Any:
    if id(value) in parents:
        return {"$cycle": len(parents) - parents.index(id(value))}
    if len(parents) >= _MAX_DEPTH:
        return {"$too_deep": _repr(value)}
    inner = (*parents, id(value))
    if _is_record(value):
        return {field.name: _convert(vars(value)[field.name], inner) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        items = [(key, _convert(item, inner)) for key, item in value.items()]
        if all(type(key) is str and not key.startswith("$") for key, _ in items):
            return {_text(key): item for key, item in items}
        return {"$dict": [[_convert(key, inner), item] for key, item in items]}
    converted = [_convert(item, inner) for item in value]
    return {"$tuple": converted} if isinstance(value, tuple) else converted


def _is_record(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__")


def _array(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def _text(text: str) -> str:
    """Text without unpaired surrogates, which UTF-8 can't hold."""
    return text.encode(errors="backslashreplace").decode()


def _repr(value: object) -> str:
    try:
        return _text(repr(value)[:_MAX_REPR])
    except Exception as error:  # the boundary to user code: a broken __repr__ must not lose the evidence around it
        return f"<{reprlib.repr(type(value))}: its repr raised {type(error).__name__}>"
