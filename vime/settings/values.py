"""Values of flags: from a settings file to the field's type, and the check of one value."""

from __future__ import annotations

import json
import math
from typing import Any

from vime.errors import SettingsError
from vime.settings.flag import Flag, Kind


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: it is something else.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text} is not a JSON object")
    return value


def from_file(described: Flag, value: Any, where: str) -> Any:
    """The field's value for one that a TOML or YAML file holds; `where` names file and key.

    Raises:
        SettingsError: the wrong type; the message has what was found and what is allowed.
    """
    if value is None and described.default is None:
        return None
    converted: Any
    if described.kind in (Kind.SWITCH, Kind.OPTIONAL_SWITCH):
        converted = value if isinstance(value, bool) else None
    elif described.kind is Kind.JSON:
        converted = value if isinstance(value, dict) else None
    elif described.kind in (Kind.LIST, Kind.REPEATED):
        items = [_one(described.type, item) for item in value] if isinstance(value, list) else [None]
        converted = None if None in items else tuple(items)
    else:
        converted = _one(described.type, value)
    if converted is None:
        raise SettingsError(
            f"{where} is {value!r} ({type(value).__name__}), allowed: {_type_name(described)}.",
            next_step="Correct the file.",
        )
    return converted


def _one(wanted: type, value: Any) -> Any:
    """`value` as `wanted`, or None. YAML reads 1e-6 as text, so numbers in text are taken for float fields."""
    if wanted is str:
        return value if isinstance(value, str) else None
    if isinstance(value, bool):
        return None
    if wanted is int:
        return value if isinstance(value, int) else None
    if isinstance(value, int | float):
        return float(value)
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _type_name(described: Flag) -> str:
    singular = {int: "an integer", float: "a number", str: "text"}
    plural = {int: "integers", float: "numbers", str: "texts"}
    if described.kind in (Kind.SWITCH, Kind.OPTIONAL_SWITCH):
        return "true or false"
    if described.kind is Kind.JSON:
        return "a table"
    if described.kind is Kind.VALUE:
        return singular[described.type]
    return f"a list of {plural[described.type]}"


def check_value(described: Flag, value: Any, where: str) -> None:
    """Check choices and range, and that text is not empty; `where` is the flag, or file and key.

    Raises:
        SettingsError: the message has the value and what is allowed.
    """
    for item in value if isinstance(value, tuple) else (value,):
        if item == "":
            raise SettingsError(
                f"{where} is empty, allowed: text of one letter or more. A variable may be unset.",
                next_step="Give a value, or leave it out.",
            )
        if isinstance(item, str) and not _is_text(item):
            raise SettingsError(
                f"{where} holds bytes that are no text, allowed: UTF-8; records of the run are written in it.",
                next_step="Correct the value; rename a file that is called so.",
            )
        allowed = None if item is None else _what_is_allowed(described, item)
        if allowed is not None:
            fault = described.check.fault(item) if described.check is not None else None
            found = repr(item)[1:-1] if isinstance(item, str) else item
            raise SettingsError(
                f"{where} is {found}{f' ({fault})' if fault else ''}, allowed: {allowed}.",
                next_step="Correct the value.",
            )


def _is_text(item: str) -> bool:
    """Bytes of a command line that aren't UTF-8 arrive as characters that can't be written again."""
    try:
        item.encode()
    except UnicodeEncodeError:
        return False
    return True


def _what_is_allowed(described: Flag, item: Any) -> str | None:
    if isinstance(item, float) and not math.isfinite(item):
        return "a finite number"
    if described.choices is not None and item not in described.choices:
        return ", ".join(described.choices)
    return None if described.check is None or described.check.allows(item) else described.check.words
