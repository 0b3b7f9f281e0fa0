"""How one field of a settings group describes its command-line flag."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """Which values are allowed, the words for them, and where it isn't plain, what is wrong with one that isn't."""

    allows: Callable[[Any], bool]
    words: str
    fault: Callable[[Any], str | None] = lambda _: None


class Kind(enum.Enum):
    """How many words a flag takes and what becomes of them. It follows from the field's annotation."""

    VALUE = "value"
    """One word: `int`, `float | None`, ..."""
    SWITCH = "switch"
    """No word, sets True (False when inverted): `bool`."""
    OPTIONAL_SWITCH = "optional switch"
    """`--x` sets True, `--no-x` False, neither None: `bool | None`."""
    LIST = "list"
    """One or more words: `tuple[int, ...] | None`."""
    REPEATED = "repeated"
    """One word each time the flag is given: `tuple[str, ...]` with `repeated=True`."""
    JSON = "json"
    """One word that holds a JSON object: `dict[str, Any]`."""


@dataclass(frozen=True)
class Flag:
    """One documented flag.

    `name` is the flag as typed and `aliases` are other spellings; `type` is the Python type of one value; `choices`
    the allowed values (None: any); `inverted` marks a switch that sets its field to False (for example
    `--disable-rewards-normalization`); `check` is applied to one value, for lists to each; `common` puts the flag
    first in the help; `secret` keeps its value out of records; `cli_only` keeps it out of settings files.
    """

    name: str
    aliases: tuple[str, ...]
    field: str
    kind: Kind
    type: type
    default: Any
    help: str
    choices: tuple[str, ...] | None = None
    inverted: bool = False
    check: Check | None = None
    common: bool = False
    secret: bool = False
    cli_only: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All spellings, `--no-x` included."""
        negative = ("--no-" + self.name[2:],) if self.kind is Kind.OPTIONAL_SWITCH else ()
        return (self.name, *self.aliases, *negative)


def flag(
    default: Any,
    help: str,
    *,
    name: str | None = None,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] | None = None,
    inverted: bool = False,
    repeated: bool = False,
    check: Check | None = None,
    common: bool = False,
    secret: bool = False,
    cli_only: bool = False,
) -> Any:
    """Dataclass field that is also a flag. Without `name` the flag is the field's name with dashes."""
    described = {
        "name": name,
        "aliases": aliases,
        "help": help,
        "choices": choices,
        "inverted": inverted,
        "check": check,
        "common": common,
        "secret": secret,
        "cli_only": cli_only,
    }
    metadata = {"flag": described, "repeated": repeated}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def flags_of(group: type) -> tuple[Flag, ...]:
    """Flags of a settings group (a dataclass whose fields were made with `flag`), in order."""
    hints = typing.get_type_hints(group)
    result = []
    for field in dataclasses.fields(group):
        described = dict(field.metadata["flag"])
        kind, value_type = _kind_and_type(hints[field.name], field.metadata["repeated"])
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        name = described.pop("name") or "--" + field.name.replace("_", "-")
        result.append(Flag(name=name, field=field.name, kind=kind, type=value_type, default=default, **described))
    return tuple(result)


def _kind_and_type(hint: Any, repeated: bool) -> tuple[Kind, type]:
    """`int | None` -> VALUE, int; `tuple[str, ...]` -> LIST, str; `bool | None` -> OPTIONAL_SWITCH, bool."""
    optional = isinstance(hint, types.UnionType)
    if optional:
        (hint,) = (part for part in hint.__args__ if part is not types.NoneType)
    origin = typing.get_origin(hint)
    if origin is tuple:
        return Kind.REPEATED if repeated else Kind.LIST, typing.get_args(hint)[0]
    if origin is dict:
        return Kind.JSON, dict
    if hint is bool:
        return Kind.OPTIONAL_SWITCH if optional else Kind.SWITCH, bool
    if hint not in (int, float, str):
        raise TypeError(f"a flag can't hold {hint!r}")
    return Kind.VALUE, hint
