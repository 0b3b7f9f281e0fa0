"""Reading the JSON files that flags name, for rules: what is wrong comes back as a problem."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vime.models.families import family_named, named_config
from vime.settings.groups import Settings
from vime.settings.rules.problem import Problem


def read_json(flag: str, path: str) -> dict[str, Any] | Problem:
    """A JSON object, or why it can't be read."""
    found = f"{flag} {path}"
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        return Problem((flag,), f"{found}: {error.strerror}", "a readable file", "", "Correct the path.")
    except (ValueError, RecursionError) as error:  # the latter for one that is nested too deeply
        return Problem((flag,), f"{found}: not JSON ({error})", "a JSON object", "", "Correct the file.")
    if not isinstance(content, dict):
        return Problem((flag,), f"{found} is not a JSON object", "a JSON object", "", "Correct the file.")
    return content


def model_config(settings: Settings) -> Mapping[str, Any]:
    """The model's config.json, as the family of --model-name; empty when it can't be read.

    A rule of `vime.settings.rules.model` says so then, and when there is no such family.
    """
    folder, name = settings.checkpoint.hf_checkpoint, settings.checkpoint.model_name
    config = {} if folder is None else read_json("--hf-checkpoint", str(Path(folder) / "config.json"))
    if isinstance(config, Problem) or (name is not None and family_named(name) is None):
        return {}
    return named_config(config, name)


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
