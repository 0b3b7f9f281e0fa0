"""Reading the small files that flags name, for rules: what is wrong comes back as a problem."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vime.errors import SettingsError
from vime.settings.files import read_mapping
from vime.settings.rules.problem import Problem


def read_table(flag: str, path: str) -> dict[str, Any] | Problem:
    """Top level of a TOML or YAML file, or why it can't be read."""
    try:
        return read_mapping(flag, path)
    except SettingsError as error:
        return Problem((flag,), error.message.rstrip("."), "a readable TOML or YAML file", "", error.next_step)


def read_json(flag: str, path: str) -> dict[str, Any] | Problem:
    """A JSON object, or why it can't be read."""
    found = f"{flag} {path}"
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        return Problem((flag,), f"{found}: {error.strerror}", "a readable file", "", "Correct the path.")
    except ValueError as error:
        return Problem((flag,), f"{found}: not JSON ({error})", "a JSON object", "", "Correct the file.")
    if not isinstance(content, dict):
        return Problem((flag,), f"{found} is not a JSON object", "a JSON object", "", "Correct the file.")
    return content


def unknown_keys(flag: str, where: str, given: Iterable[str], known: Iterable[str]) -> Iterator[Problem]:
    """Keys that nothing reads, each with the nearest known one."""
    names = sorted(known)
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)[0]
            yield Problem(
                (flag,),
                f"{where} has the key {key!r}",
                ", ".join(names),
                f"The nearest one is {near}.",
                "Correct the key.",
            )


def tables(flag: str, where: str, content: Mapping[str, Any], key: str) -> list[dict[str, Any]] | Problem:
    """The list of tables under a key, or that it isn't one."""
    found = content.get(key)
    if isinstance(found, list) and found and all(isinstance(entry, dict) for entry in found):
        return found
    shown = "left out" if key not in content else repr(found)
    return Problem((flag,), f"{where}: {key} is {shown}", "a list of tables, one or more", "", "Correct the file.")
