"""`--megatron-config-path`: Megatron overrides for actor and critic."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from vime.settings.schemas.typed_yaml import Strict, read_typed, refuse

logger = logging.getLogger(__name__)

FLAG = "--megatron-config-path"
Role = Literal["actor", "critic"]


class RoleEntry(Strict, frozen=True):
    """What one role overrides. `args` is an older spelling of `overrides`; node counts come from the flags."""

    role: Role
    name: str = "default"
    overrides: dict[str, Any] | None = None
    args: dict[str, Any] | None = None
    num_nodes: int | None = None
    num_gpus_per_node: int | None = None


class MegatronConfig(Strict, frozen=True):
    """The file."""

    megatron: list[RoleEntry]


def read_megatron_config(path: str) -> MegatronConfig:
    """Read and check the file.

    Raises:
        SettingsError: as `read_typed`, two entries of one role, or one with both `overrides` and `args`.
    """
    config = read_typed(FLAG, path, MegatronConfig)
    seen: dict[str, int] = {}
    for index, entry in enumerate(config.megatron):
        place = f"megatron[{index}]"
        if entry.role in seen:
            raise refuse(path, place, f"is a second {entry.role}, the first is megatron[{seen[entry.role]}]")
        seen[entry.role] = index
        if entry.overrides is not None and entry.args is not None:
            raise refuse(path, place, "has overrides and args, allowed: one of them", "Move all keys into overrides.")
    return config


def megatron_config_warnings(path: str, config: MegatronConfig) -> list[str]:
    """Keys that are accepted and ignored."""
    ignored = [
        (index, key)
        for index, entry in enumerate(config.megatron)
        for key, value in (("num_nodes", entry.num_nodes), ("num_gpus_per_node", entry.num_gpus_per_node))
        if value is not None
    ]
    return [
        f"{path}: megatron[{index}].{key} is ignored: actor and critic share the nodes of --actor-num-nodes."
        for index, key in ignored
    ]


def role_overrides(path: str, role: Role, existing: Mapping[str, Any]) -> dict[str, Any]:
    """Values to set for a role over `existing`, attribute name -> value; empty when the file says nothing of it.

    Text becomes the number type of the existing value (YAML reads 1e-6 as text). A key that `existing` lacks is set
    all the same, with a warning.

    Raises:
        SettingsError: as `read_megatron_config`, or text that is no such number.
    """
    values, warnings = overrides_of(path, read_megatron_config(path), role, existing)
    for warning in warnings:
        logger.warning("%s", warning)
    return values


def overrides_of(
    path: str, config: MegatronConfig, role: Role, existing: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """As `role_overrides`, for a file that is read already, with the warnings."""
    values: dict[str, Any] = {}
    warnings = []
    for index, entry in enumerate(config.megatron):
        table = "args" if entry.args is not None else "overrides"
        for key, value in (entry.overrides or entry.args or {}).items() if entry.role == role else ():
            name, place = key.replace("-", "_"), f"megatron[{index}].{table}.{key}"
            if name not in existing:
                warnings.append(f"{path}: {place} is no known argument; it is set for the {role} all the same.")
            values[name] = _as_existing(value, existing.get(name), path, place)
    return values, warnings


def _as_existing(value: Any, existing: Any, path: str, place: str) -> Any:
    if not isinstance(value, str) or isinstance(existing, bool) or not isinstance(existing, int | float):
        return value
    try:
        return type(existing)(value)
    except ValueError as error:
        allowed = "a whole number" if isinstance(existing, int) else "a number"
        raise refuse(path, place, f"is {value!r}, allowed: {allowed}") from error


def check_megatron_config(path: str, existing: Mapping[str, Any]) -> list[str]:
    """Read the file and try its overrides on `existing`; the warnings. Raises as `role_overrides`."""
    config = read_megatron_config(path)
    warnings = megatron_config_warnings(path, config)
    for entry in config.megatron:
        warnings += overrides_of(path, config, entry.role, existing)[1]
    return warnings
