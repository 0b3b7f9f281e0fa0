"""Settings files: `--config` with a table for each group, `--custom-config-path` with flat keys."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.errors import SettingsError, joined, reason_of
from vime.settings.flag import Flag
from vime.settings.groups import GROUPS, all_flags
from vime.settings.passed_on import PassedOn, listed_megatron_flags, nearest_words
from vime.settings.values import check_value, from_file

PASSED_ON_TABLES = {"vllm_args": "--vllm-", "router_args": "--router-", "megatron_args": "--"}
"""Tables of a `--config` file that hold flags of others, and what their keys become flags with."""


@dataclass(frozen=True)
class FileEntries:
    """What a settings file says: field name -> value, flags for others, and what is wrong with the other keys."""

    values: dict[str, Any] = field(default_factory=dict)
    passed_on: PassedOn = field(default_factory=PassedOn)
    errors: list[SettingsError] = field(default_factory=list)


def read_config(path: str, *, flag: str = "--config") -> tuple[dict[str, Any], PassedOn]:
    """Field name -> value of a file as `--config` takes it, and its flags for others; `flag` named the file.

    Raises:
        SettingsError: it can't be read or parsed; an unknown table or key (with the nearest one), a wrong type or a
            value out of range, each with file and key, all of them at once.
    """
    entries = config_entries(path, flag=flag)
    if entries.errors:
        raise joined(entries.errors, "keys can't be used")
    return entries.values, entries.passed_on


def config_entries(path: str, *, flag: str = "--config") -> FileEntries:
    """As `read_config`, with the errors of the keys beside what is right."""
    result = FileEntries()
    for table, entries in read_mapping(flag, path).items():
        where = f"{path}: {table}"
        if table not in GROUPS and table not in PASSED_ON_TABLES:
            belongs = f" ({table} belongs into {all_flags()[table][0]})" if table in all_flags() else ""
            result.errors.append(_unknown(where, table, [*GROUPS, *PASSED_ON_TABLES], belongs))
        elif not isinstance(entries, dict):
            wrong = f"{where} is {entries!r}, allowed: a table of keys."
            result.errors.append(SettingsError(wrong, next_step="Correct the file."))
        else:
            for key, value in entries.items():
                with _collecting(result.errors):
                    _take_key(result, table, key, value, f"{path}: {table}.{key}")
    return result


def _take_key(result: FileEntries, table: str, key: str, value: Any, where: str) -> None:
    if table in PASSED_ON_TABLES:
        name = PASSED_ON_TABLES[table] + key.replace("_", "-")
        result.passed_on.owner_of(name).extend(flag_words(name, value, where))
        return
    fields, name = all_flags(), key.replace("-", "_")
    group, described = fields.get(name, ("", None))
    if described is None or group != table:
        belongs = f" ({key} belongs into {group})" if group else ""
        raise _unknown(where, key, [name for name, (owner, _) in fields.items() if owner == table], belongs)
    _set_once(result.values, name, _value(described, value, where), where)


def custom_config_entries(path: str) -> FileEntries:
    """What a `--custom-config-path` file says.

    A key is the name of an argument: a field of vime (`eps_clip`), or a flag of others with underscores
    (`vllm_max_model_len`, `recompute_granularity`).

    Raises:
        SettingsError: it can't be read or parsed.
    """
    result, fields = FileEntries(), all_flags()
    for key, value in read_mapping("--custom-config-path", path).items():
        where = f"{path}: {key}"
        attribute, name = key.replace("-", "_"), "--" + key.replace("_", "-")
        with _collecting(result.errors):
            if attribute in fields:
                _set_once(result.values, attribute, _value(fields[attribute][1], value, where), where)
            elif name.startswith(("--vllm-", "--router-")) or name in listed_megatron_flags():
                result.passed_on.owner_of(name).extend(flag_words(name, value, where))
            else:
                raise _unknown(where, key, fields)
    return result


@contextlib.contextmanager
def _collecting(errors: list[SettingsError]) -> Iterator[None]:
    try:
        yield
    except SettingsError as error:
        errors.append(error)


def flag_words(name: str, value: Any, where: str) -> list[str]:
    """Words of the command line for a flag of others: `true` gives the bare flag, a list several values.

    Raises:
        SettingsError: false, nothing, or a table.
    """
    if value is True:
        return [name]
    items = value if isinstance(value, list) else [value]
    if not items or any(isinstance(item, bool) or not isinstance(item, int | float | str) for item in items):
        raise SettingsError(
            f"{where} is {value!r}, allowed: true, a number, text, or a list of these.",
            next_step="Leave a switch out, or use its --no- form with true.",
        )
    return [name, *(str(item) for item in items)]


def _value(described: Flag, value: Any, where: str) -> Any:
    if described.cli_only:
        raise SettingsError(f"{where} can't be set in a file.", next_step=f"Give {described.name} as a flag.")
    converted = from_file(described, value, where)
    check_value(described, converted, where)
    return converted


def _set_once(values: dict[str, Any], field: str, value: Any, where: str) -> None:
    if field in values:
        raise SettingsError(f"{where} is there twice, with a dash and with an underscore.", next_step="Keep one.")
    values[field] = value


def _unknown(where: str, key: str, known: Iterable[str], more: str = "") -> SettingsError:
    near = nearest_words(key.replace("-", "_"), known)
    step = "Correct the key." if near else "Correct or remove it; docs/flags.md lists the settings."
    return SettingsError(f"{where} is not a setting{more}{near}.", next_step=step)


def read_mapping(flag: str, path: str) -> dict[str, Any]:
    """Top level of a TOML or YAML file, chosen by its name's ending; `flag` named the file.

    Raises:
        SettingsError: it can't be read or parsed, or its top level is no mapping with text as keys.
    """
    try:
        text = Path(path).read_text()
        parsed = tomllib.loads(text) if path.endswith(".toml") else _parse_yaml(text)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{flag} {path}: {reason_of(error)}.", next_step="Name a readable TOML or YAML file."
        ) from error
    if not isinstance(parsed, dict) or not all(isinstance(key, str) for key in parsed):
        raise SettingsError(
            f"{flag} {path}: allowed at the top level: keys with values.", next_step="Correct the file."
        )
    return parsed


def _parse_yaml(text: str) -> Any:
    """Safe YAML without duplicate keys; ValueError for anything else."""
    import yaml

    try:
        _refuse_duplicates(yaml.compose(text, Loader=yaml.SafeLoader))
        parsed = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ValueError(f"{where}{error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    return {} if parsed is None else parsed


def _refuse_duplicates(node: Any) -> None:
    import yaml

    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        for key, value in node.value:
            if keys.count(key.value) > 1:
                raise ValueError(f"line {key.start_mark.line + 1}: the key {key.value!r} is there twice")
            _refuse_duplicates(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(item)
