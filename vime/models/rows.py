"""One row of the table between Megatron's shape flags and the entries of `config.json`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vime.errors import ModelError

Config = Mapping[str, Any]
"""A parsed `config.json`."""
Value = int | float | str | bool
Shape = Mapping[str, Value]
"""Flag -> value; a switch is there with True or not at all."""


@dataclass(frozen=True)
class Row:
    """One flag of Megatron and what it is in `config.json`.

    `key` names the entry for messages. `read` gives the flag's value for a config (False: a switch that stays off;
    None: the flag isn't needed), `write` the entries for a shape. `aliases` are switches that say the same as the flag
    with its value in this row. `compared` is False for what doesn't change the trained model.
    """

    flag: str
    type: type
    key: str
    read: Callable[[Config], Value | None]
    write: Callable[[Shape], dict[str, Any]]
    aliases: tuple[str, ...] = ()
    compared: bool = True


def whole(flag: str, key: str, *, compared: bool = True) -> Row:
    """A whole number above 0 under the same meaning."""
    return Row(flag, int, key, lambda config: positive(config, key), lambda shape: {key: shape[flag]}, (), compared)


def real(flag: str, key: str, default: float | None = None) -> Row:
    """A number."""
    return Row(flag, float, key, lambda config: number(config, key, default), lambda shape: {key: shape[flag]})


def fixed(flag: str, value: Value, *, aliases: tuple[str, ...] = ()) -> Row:
    """What all models of the type have; False for a switch that none of them has."""
    return Row(flag, type(value), "model_type", lambda _: value, lambda _: {}, aliases)


def switch(flag: str, key: str, *, on: bool = True, default: bool = False) -> Row:
    """A switch that is given when `key` is `on`."""
    return Row(
        flag,
        bool,
        key,
        lambda config: bool(config.get(key, default)) is on,
        lambda shape: {key: on if flag in shape else not on},
    )


def positive(config: Config, key: str) -> int:
    """A whole number above 0. Raises `ModelError` naming key and value."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} is {value!r}, allowed: a whole number above 0.")
    return value


def number(config: Config, key: str, default: float | None = None) -> float:
    """A number. Raises `ModelError` naming key and value."""
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"config.json: {key} is {value!r}, allowed: a number.")
    return float(value)


def from_text(row: Row, text: str) -> Value:
    """A flag's value from the command line. Raises `ValueError` when it isn't of the row's type."""
    if row.flag == "--moe-layer-freq":
        return layer_pattern(expand_layers(text))
    if row.type is int:
        return int(text)
    if row.type is bool:
        raise ValueError(f"{row.flag} takes no value")
    return float(text) if row.type is float else text


def expand_layers(text: str) -> list[int]:
    """`([0]*3+[1]*58)` -> three zeros and 58 ones, without running it. Raises `ValueError` for anything else."""
    layers: list[int] = []
    for part in text.replace(" ", "").strip("()").split("+"):
        match = re.fullmatch(r"\(?\[([01](?:,[01])*)\](?:\*(\d+))?\)?", part)
        if match is None:
            raise ValueError(f"{text} is not a layer pattern such as ([0]*3+[1]*58)")
        layers += [int(layer) for layer in match[1].split(",")] * int(match[2] or 1)
    return layers


def layer_pattern(layers: list[int]) -> str:
    """Dense layers (0) and expert layers (1) as Megatron writes them, in runs."""
    runs: list[tuple[int, int]] = []
    for layer in layers:
        runs = [*runs[:-1], (layer, runs[-1][1] + 1)] if runs and runs[-1][0] == layer else [*runs, (layer, 1)]
    return "(" + "+".join(f"[{layer}]*{count}" for layer, count in runs) + ")"
