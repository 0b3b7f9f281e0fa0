"""A model's shape from `config.json` or from flags, and whether the two agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vime.errors import ModelError, SettingsError
from vime.models.families import FAMILIES, family_of
from vime.models.rows import Config, Row, Shape, Value, from_text


def shape_of_config(config: Config) -> dict[str, Value]:
    """Megatron's shape flags for a parsed `config.json`.

    Raises:
        ModelError: an unknown `model_type`, or an entry that Megatron's flags can't express.
    """
    values = {row.flag: row.read(config) for row in _rows(config.get("model_type"))}
    return {flag: value for flag, value in values.items() if value is not None and value is not False}


def config_of_shape(model_type: str, shape: Shape) -> dict[str, Any]:
    """Entries of `config.json` for shape flags: the other direction of `shape_of_config`.

    Raises:
        ModelError: an unknown `model_type`.
    """
    config: dict[str, Any] = {"model_type": model_type}
    for row in _rows(model_type):
        if row.flag in shape or row.type is bool:
            for key, value in row.write(shape).items():
                config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return config


def shape_argv(shape: Shape) -> list[str]:
    """Words of the command line for a shape."""
    words: list[str] = []
    for flag, value in shape.items():
        words += [flag] if value is True else [flag, repr(value) if isinstance(value, float) else str(value)]
    return words


def shape_of_argv(model_type: str, argv: Sequence[str]) -> dict[str, Value]:
    """The shape flags among `argv`, aliases under their flag's name; other flags are left out.

    Raises:
        ModelError: an unknown `model_type`.
        SettingsError: a value that isn't of the flag's type.
    """
    rows = {row.flag: row for row in _rows(model_type)}
    meant = {alias: row for row in rows.values() for alias in row.aliases}
    shape: dict[str, Value] = {}
    for flag, values in _flags(argv):
        if flag in meant:
            shape[meant[flag].flag] = _fixed_value(meant[flag])
        elif flag in rows:
            shape[flag] = _value(rows[flag], values)
    return shape


@dataclass(frozen=True)
class Contradiction:
    """A flag that says something else than `config.json`; `expected` is False for a switch that must stay off."""

    flag: str
    key: str
    given: Value
    expected: Value | None

    def __str__(self) -> str:
        if self.expected is None or self.expected is False:
            given = "given" if self.given is True else str(self.given)
            return f"{self.flag} is {given}, but by config.json ({self.key}) the model has none"
        return f"{self.flag} is {self.given}, but config.json ({self.key}) has {self.expected}"

    @property
    def allowed(self) -> str:
        """What would do instead."""
        return "left out" if self.expected is None or self.expected is False else f"{self.expected}, or left out"


def contradictions(config: Config, argv: Sequence[str]) -> list[Contradiction]:
    """Shape flags in `argv` that don't fit `config`. Only entries of given flags are read.

    Raises as `shape_of_config` and `shape_of_argv`.
    """
    given = shape_of_argv(str(config.get("model_type")), argv)
    found = []
    for row in _rows(config.get("model_type")):
        if row.compared and row.flag in given:
            expected = row.read(config)
            if given[row.flag] != expected:
                found.append(Contradiction(row.flag, row.key, given[row.flag], expected))
    return found


def refuse_contradictions(config: Config, argv: Sequence[str]) -> None:
    """Raise `SettingsError` with flag, given value and config.json's value for each that doesn't fit."""
    found = [f"{found}, allowed: {found.allowed}." for found in contradictions(config, argv)]
    if found:
        raise SettingsError(
            "\n".join(found),
            next_step="Leave the model flags out: they are derived from config.json; or name another --hf-checkpoint.",
        )


def _rows(model_type: Any) -> tuple[Row, ...]:
    if family_of({"model_type": model_type}) is None:
        raise ModelError(
            f"config.json: model_type is {model_type!r}, allowed: {', '.join(FAMILIES)}.",
            next_step="Choose a checkpoint of an allowed type.",
        )
    return FAMILIES[model_type]


def _fixed_value(row: Row) -> Value:
    value = row.read({})
    if value is None:
        raise TypeError(f"{row.flag} has aliases but no value of its own")
    return value


def _value(row: Row, values: list[str]) -> Value:
    if row.type is bool and not values:
        return True
    try:
        (text,) = values
        return from_text(row, text)
    except ValueError as error:
        allowed = {int: "one whole number", float: "one number", bool: "no value"}.get(row.type, "one word")
        raise SettingsError(
            f"{row.flag} is {' '.join(values) or 'without a value'}, allowed: {allowed}.",
            next_step="Correct the value.",
        ) from error


def _flags(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the words up to the next one."""
    current: tuple[str, list[str]] | None = None
    for word in argv:
        if word.startswith("--"):
            if current is not None:
                yield current
            flag, has_value, value = word.partition("=")
            current = (flag, [value] if has_value else [])
        elif current is not None:
            current[1].append(word)
    if current is not None:
        yield current
