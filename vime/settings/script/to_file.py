"""From the words of a command line to the text of a `--config` file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vime.settings.files import PASSED_ON_TABLES
from vime.settings.flag import Kind
from vime.settings.groups import GROUPS, all_flags
from vime.settings.parser import parse_words
from vime.settings.passed_on import (
    is_of_sglang,
    listed_megatron_flags,
    listed_megatron_version,
    nearest_words,
    own_flag_names,
    share_out,
    vllm_flag_of,
)
from vime.settings.resolve import checked_values
from vime.settings.script.reader import LaunchScript
from vime.settings.script.variables import Located

Tables = dict[str, dict[str, Any]]
"""Table -> key -> value, as `--config` reads them."""


def settings_tables(script: LaunchScript) -> tuple[Tables, list[str]]:
    """The tables of a `--config` file that says the same as the script's flags, and what could not be mapped."""
    tables: Tables = {name: {} for name in (*GROUPS, *PASSED_ON_TABLES)}
    notes = list(script.notes)
    for flag, values in _flags(script.words, notes):
        parsed, rest, wrong = parse_words([flag.text, *(value.text for value in values)])
        given, out_of_range = checked_values(parsed)
        misspelt = share_out(rest)[1]
        notes += [f"{flag.where}: {error.message}" for error in (*wrong, *out_of_range, *misspelt)]
        for field, value in given.items():
            group, described = all_flags()[field]
            if described.cli_only:
                notes.append(f"{flag.where}: {described.name} can't be set in a file; give it on the command line.")
            elif described.kind is Kind.REPEATED:
                tables[group][field] = [*tables[group].get(field, []), *value]
            else:
                tables[group][field] = list(value) if isinstance(value, tuple) else value
        if rest and not misspelt:
            _pass_on(rest, flag.where, tables, notes)
    return {name: entries for name, entries in tables.items() if entries}, notes


def toml_text(tables: Mapping[str, Mapping[str, Any]], comments: Sequence[str] = ()) -> str:
    """A TOML file with these tables; `comments` come first."""
    lines = ["# " + line for comment in comments for line in comment.splitlines()]
    for name, entries in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in entries.items())]
    return "\n".join(lines).strip() + "\n"


def _flags(words: Sequence[Located], notes: list[str]) -> Iterator[tuple[Located, list[Located]]]:
    """Each flag with its values; a stray word becomes a note."""
    flag: Located | None = None
    values: list[Located] = []
    for word in words:
        if word.text.startswith("--"):
            if flag is not None:
                yield flag, values
            flag, values = word, []
        elif flag is None:
            notes.append(f"{word.where}: the word {word.text!r} belongs to no flag.")
        else:
            values.append(word)
    if flag is not None:
        yield flag, values


def _pass_on(words: list[str], where: str, tables: Tables, notes: list[str]) -> None:
    flag, has_value, value = words[0].partition("=")
    table, prefix = next((table, prefix) for table, prefix in PASSED_ON_TABLES.items() if flag.startswith(prefix))
    if is_of_sglang(flag):
        meant = vllm_flag_of(flag)
        near = f" (the nearest one is {meant})" if meant else ""
        notes.append(f"{where}: {flag} is a flag of SGLang. Replace it by one of vLLM{near}: `vime train` refuses it.")
    elif prefix == "--" and flag not in listed_megatron_flags():
        near = nearest_words(flag, {*own_flag_names(), *listed_megatron_flags()})
        owners = f"neither of vime nor of Megatron {listed_megatron_version()}"
        notes.append(f"{where}: {flag} is a flag {owners}{near}. It is kept, and refused unless Megatron gets it.")
    items = [_scalar(text) for text in ([value] if has_value else words[1:])]
    key = flag.removeprefix(prefix)
    if key in tables[table]:
        notes.append(f"{where}: {flag} is given again; the last one counts.")
    tables[table][key] = True if not items else items[0] if len(items) == 1 else items


def _scalar(text: str) -> int | float | str:
    """A number where writing it gives the same text again."""
    for number in (int, float):
        try:
            if str(number(text)) == text and text not in ("inf", "-inf", "nan"):
                return number(text)
        except ValueError:
            continue
    return text


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)
