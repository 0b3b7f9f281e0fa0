"""How one field of a settings group describes its command-line flag."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Flag:
    """One documented flag.

    `name` is the flag as typed; `type` the Python type of one value; `choices` the allowed values (None: any);
    `inverted` marks a switch that sets its field to False (for example `--disable-rewards-normalization`);
    `check` returns a sentence about what is allowed when the value is not, else None.
    """

    name: str
    field: str
    type: type
    default: Any
    help: str
    choices: tuple[str, ...] | None = None
    inverted: bool = False
    check: Callable[[Any], str | None] | None = None

    @property
    def is_switch(self) -> bool:
        return self.type is bool


def flag(
    default: Any,
    help: str,
    *,
    name: str | None = None,
    choices: tuple[str, ...] | None = None,
    inverted: bool = False,
    check: Callable[[Any], str | None] | None = None,
) -> Any:
    """Dataclass field that is also a flag. Without `name` the flag is the field's name with dashes."""
    metadata = {"help": help, "name": name, "choices": choices, "inverted": inverted, "check": check}
    return dataclasses.field(default=default, metadata={"flag": metadata})


def flags_of(group: type) -> list[Flag]:
    """Flags of a settings group (a dataclass whose fields were made with `flag`), in order."""
    hints = typing.get_type_hints(group)
    result = []
    for field in dataclasses.fields(group):
        described = field.metadata["flag"]
        result.append(
            Flag(
                name=described["name"] or "--" + field.name.replace("_", "-"),
                field=field.name,
                type=_value_type(hints[field.name]),
                default=field.default,
                help=described["help"],
                choices=described["choices"],
                inverted=described["inverted"],
                check=described["check"],
            )
        )
    return result


def _value_type(hint: Any) -> type:
    """`int | None` -> int; `int` -> int."""
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in hint.__args__ if part is not types.NoneType)
    if not isinstance(hint, type):
        raise TypeError(f"a flag holds one plain value, not {hint!r}")
    return hint


def at_least(minimum: float) -> Callable[[Any], str | None]:
    """Check for numbers: `minimum` or more."""
    return lambda value: None if value >= minimum else f"{minimum} or more"


def above(limit: float) -> Callable[[Any], str | None]:
    """Check for numbers: more than `limit`."""
    return lambda value: None if value > limit else f"more than {limit}"
