"""JSON as the standard has it, with the column of what is wrong: no NaN, no duplicate keys, no silent overflow."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|-?Infinity|NaN|-?\d[\d.eE+-]*|[{}\[\]:]', re.DOTALL)


class JsonFault(ValueError):
    """What is wrong with a JSON text. `column` counts characters from 1."""

    def __init__(self, reason: str, column: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.column = column


class _Suspect(Exception):
    """Something that Python's parser accepts and we don't; its column is found in a second pass."""


def loads_strict(data: bytes) -> Any:
    """The value of one JSON text in UTF-8. Raises `JsonFault`."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        column = len(data[: error.start].decode()) + 1
        raise JsonFault(f"byte 0x{data[error.start]:02x} is not UTF-8", column) from error
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
    except json.JSONDecodeError as error:
        raise JsonFault(f"bad JSON ({error.msg})", error.pos + 1) from error
    except RecursionError as error:
        raise JsonFault("nested too deeply", 1) from error
    except _Suspect as suspect:
        raise _locate(text) from suspect
    if "\\ud" in text.lower():
        _refuse_surrogates(value, text)
    return value


def key_column(text: str, key: str) -> int:
    """Column of a key of the outermost object, 1 when it has no such key."""
    return next((column for depth, name, column in _keys(text) if depth == 1 and name == key), 1)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _Suspect
    return value


def _constant(name: str) -> float:
    raise _Suspect(name)


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise _Suspect(digits)
    return value


def _locate(text: str) -> JsonFault:
    """The first duplicate key or non-finite number of a text that is otherwise well-formed."""
    faults = [
        JsonFault(f"{match.group()} is not a finite number", match.start() + 1)
        for match in _TOKEN.finditer(text)
        if match.group()[0] in "-0123456789IN" and not math.isfinite(float(match.group()))
    ]
    open_objects: list[set[str]] = []
    for depth, name, column in _keys(text):
        del open_objects[depth:]
        if name is None:
            open_objects += [set() for _ in range(depth - len(open_objects))]
            open_objects[-1] = set()
        elif name in open_objects[-1]:
            faults.append(JsonFault(f"duplicate key {name!r}", column))
        else:
            open_objects[-1].add(name)
    return min(faults, key=lambda fault: fault.column)


def _keys(text: str) -> Iterator[tuple[int, str | None, int]]:
    """(depth, key, column) of every object key, and (depth, None, column) where an object opens."""
    depth = 0
    string: re.Match[str] | None = None
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token in "{[":
            depth += 1
            if token == "{":
                yield depth, None, match.start() + 1
        elif token in "}]":
            depth -= 1
        elif token == ":" and string is not None:
            yield depth, json.loads(string.group()), string.start() + 1
        string = match if token[0] == '"' else None


def _refuse_surrogates(value: Any, text: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise JsonFault("unpaired surrogate in a string", text.lower().index("\\ud") + 1) from error
