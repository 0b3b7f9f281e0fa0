"""A YAML file as a typed struct; errors name the file and the place of the bad value in it."""

from __future__ import annotations

import re
import typing
from typing import Any, TypeVar

import msgspec

from vime.errors import SettingsError
from vime.settings.files import read_mapping
from vime.settings.passed_on import nearest_words

T = TypeVar("T")

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}
"""msgspec's names of types."""


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the structs: unknown keys are refused, and the struct can't be changed."""


def read_typed(flag: str, path: str, type_: type[T]) -> T:
    """The file's content as `type_`.

    Raises:
        SettingsError: it can't be read or parsed, or a value has the wrong type; with the place of the value.
    """
    content = read_mapping(flag, path)
    try:
        return msgspec.convert(content, type_)
    except msgspec.ValidationError as error:
        raise _refused(path, content, str(error), type_) from error


def refuse(path: str, place: str, found: str, next_step: str = "Correct the file.") -> SettingsError:
    """The error for one place in a file: `refuse("m.yaml", "megatron[0].role", "is 'x', allowed: actor")`."""
    return SettingsError(f"{path}: {place} {found}.", next_step=next_step)


def _refused(path: str, content: Any, complaint: str, type_: type) -> SettingsError:
    what, _, where = complaint.partition(" - at `$")
    place = where.rstrip("`").removeprefix(".") or "the top level"
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what)
    if unknown is not None:
        known = _known_keys(type_, place)
        allowed = f"{', '.join(known)}{nearest_words(unknown[1], known)}"
        return refuse(path, place, f"has the unknown key {unknown[1]}, allowed: {allowed}")
    missing = re.fullmatch(r"Object missing required field `(.*)`", what)
    if missing is not None:
        return refuse(path, place, f"has no {missing[1]}, which it needs", f"Add the key {missing[1]}.")
    return refuse(path, place, f"is {_at(content, place)!r}, allowed: {_allowed(what, type_, place)}")


def _allowed(complaint: str, type_: type, place: str) -> str:
    """What msgspec expected, in words; the choices where it names none."""
    expected = re.match(r"Expected `(.*?)`", complaint)
    if expected is not None:
        return " or ".join(_WORDS.get(part, part) for part in expected[1].split(" | ") if part != "null")
    if complaint.startswith("Invalid enum value"):
        return ", ".join(str(choice) for part in _parts(_hint_at(type_, place)) for choice in typing.get_args(part))
    return f"{complaint[0].lower()}{complaint[1:]}".replace("`", "")


def _known_keys(type_: type, place: str) -> list[str]:
    """Keys of the struct at a place such as `vllm[0].server_groups[1]`."""
    struct = next(part for part in _parts(_hint_at(type_, place)) if _is_struct(part))
    return [field.encode_name for field in msgspec.structs.fields(struct)]


def _hint_at(type_: type, place: str) -> Any:
    """The type hint of the value at a place."""
    hint: Any = type_
    for name in re.findall(r"[a-z_]+", "" if place == "the top level" else place):
        struct = next(part for part in _parts(hint) if _is_struct(part))
        hint = next(field.type for field in msgspec.structs.fields(struct) if field.encode_name == name)
    return hint


def _parts(hint: Any) -> tuple[Any, ...]:
    """A hint, and what it holds if it is a list or a union."""
    return (hint, *typing.get_args(hint))


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _at(content: Any, place: str) -> Any:
    """The value at a place; the content itself where msgspec names no index, as in `[...]`."""
    for name, index in re.findall(r"([a-zA-Z_]\w*)|\[(\d+)\]", "" if place == "the top level" else place):
        content = content[name] if name else content[int(index)]
    return content
