"""One record of a prompt file: which keys matter, and what makes it unusable."""

from __future__ import annotations

from typing import Any

import msgspec

from vime.data.strict_json import JsonFault, loads_strict

_PLAIN = (str, int, float, bool, bytes, type(None))


class RecordKeys(msgspec.Struct, frozen=True):
    """Names of the fields that a record is read by."""

    input_key: str
    label_key: str | None
    metadata_key: str | None
    tool_key: str | None = None
    media_keys: dict[str, str] = {}
    """Kind of media -> field; a record may lack it."""

    @property
    def optional(self) -> dict[str, str]:
        """Flag -> key that a record may have, where one flag names one key."""
        given = {"--metadata-key": self.metadata_key, "--tool-key": self.tool_key}
        return {flag: key for flag, key in given.items() if key is not None}

    @property
    def all(self) -> frozenset[str]:
        """Every key that is looked at."""
        return frozenset([*self.required.values(), *self.optional.values(), *self.media_keys.values()])

    @property
    def required(self) -> dict[str, str]:
        """Flag -> key that every record must have."""
        given = {"--input-key": self.input_key, "--label-key": self.label_key}
        return {flag: key for flag, key in given.items() if key is not None}


class RecordFault(ValueError):
    """Why a record can't be used, and the key that is at fault (None: the record as a whole).

    `flag` is the one that names a key which the record lacks.
    """

    def __init__(self, reason: str, key: str | None = None, flag: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.key = key
        self.flag = flag


class PromptRecord(msgspec.Struct, frozen=True):
    """A usable record."""

    prompt: str | list[dict[str, Any]]
    label: Any
    metadata: dict[str, Any]
    """With the record's tools, when it has some, as `tools`."""
    media: dict[str, list[Any]] = {}


def read_record(value: object, keys: RecordKeys) -> PromptRecord:
    """The parts of a record that training uses. Raises `RecordFault`.

    The prompt is a non-empty string or a list of chat messages; the label may be anything plain; metadata is an
    object, empty when the record has none; tools are a list of objects, or that as JSON text; media of one kind are one
    value or a list of them.
    """
    if not isinstance(value, dict):
        raise RecordFault(f"a record must be an object, found {_name(value)}")
    for flag, required in keys.required.items():
        if required not in value:
            raise RecordFault(f"no key {required!r}; the record has {sorted(value)}", flag=flag)
    prompt = value[keys.input_key]
    _check_prompt(prompt, keys.input_key)
    label = None if keys.label_key is None else value[keys.label_key]
    metadata = {} if keys.metadata_key is None else value.get(keys.metadata_key)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise RecordFault(f"{keys.metadata_key!r} must be an object, found {_name(metadata)}", keys.metadata_key)
    tools = None if keys.tool_key is None else _tools(value.get(keys.tool_key), keys.tool_key)
    for key in keys.all:
        _check_plain(value.get(key), key)
    media = {kind: value[key] for kind, key in keys.media_keys.items() if value.get(key) is not None}
    return PromptRecord(
        prompt,
        label,
        metadata if tools is None else {**metadata, "tools": tools},
        {kind: part if isinstance(part, list) else [part] for kind, part in media.items()},
    )


def _tools(value: object, key: str) -> list[dict[str, Any]] | None:
    """None without tools. Raises `RecordFault`."""
    if isinstance(value, str):
        try:
            value = loads_strict(value.encode())
        except JsonFault as fault:
            raise RecordFault(f"{key!r} is text that is not JSON: {fault.reason}", key) from fault
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RecordFault(f"{key!r} must be a list of objects, or that as JSON text, found {_name(value)}", key)
    return value


def _check_prompt(prompt: object, key: str) -> None:
    if isinstance(prompt, str):
        if not prompt:
            raise RecordFault(f"{key!r} is empty", key)
        return
    if not isinstance(prompt, list):
        raise RecordFault(f"{key!r} must be a string or a list of messages, found {_name(prompt)}", key)
    if not prompt:
        raise RecordFault(f"{key!r} is empty", key)
    for position, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise RecordFault(f"{key!r}: message {position} must be an object with role and content", key)


def _check_plain(value: object, key: str | None) -> None:
    """Refuse what only Parquet can hold (dates, decimals) and numbers that are not finite."""
    if isinstance(value, dict):
        for part in value.values():
            _check_plain(part, key)
    elif isinstance(value, list):
        for part in value:
            _check_plain(part, key)
    elif not isinstance(value, _PLAIN):
        raise RecordFault(f"{key!r} holds a value of type {_name(value)}", key)
    elif isinstance(value, float) and value - value != 0:
        raise RecordFault(f"{key!r} holds {value}, not a finite number", key)


def _name(value: object) -> str:
    return "null" if value is None else type(value).__name__
