"""Rule on the content of --rollout-storage-declaration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vime.settings.groups import Settings
from vime.settings.rules.config_files import read_json, unknown_keys
from vime.settings.rules.problem import Problem

_Check = Callable[[Any], bool]
_DECLARED: dict[str, tuple[_Check, str, str]] = {
    "direct_mount": (
        lambda value: value is True,
        "true",
        "A re-exported mount breaks the order of writes.",
    ),
    "writeback": (
        lambda value: value is False,
        "false",
        "A write-back cache acknowledges writes before they are durable.",
    ),
    "open_cache": (
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value == 0,
        "0",
        "Cached opens show other hosts' growing files at an old length.",
    ),
    "readdir_cache": (
        lambda value: value is False,
        "false",
        "Cached folders hide other hosts' new files.",
    ),
    "client_version": (
        lambda value: isinstance(value, str) and value.strip() != "",
        "text",
        "It says which client was looked at.",
    ),
    "durability_description": (
        lambda value: isinstance(value, str) and value.strip() != "",
        "text",
        "It says where data and metadata are kept.",
    ),
}


def declared_mount_is_safe(settings: Settings) -> Iterator[Problem]:
    """Every option that lets acknowledged samples vanish, or other hosts read old ones, must be declared as off."""
    flag, path = "--rollout-storage-declaration", settings.queue.rollout_storage_declaration
    if path is None:
        return
    declared = read_json(flag, path)
    if isinstance(declared, Problem):
        yield declared
        return
    yield from unknown_keys(flag, path, declared, _DECLARED)
    for key, (fits, allowed, reason) in _DECLARED.items():
        if key not in declared or not fits(declared[key]):
            found = repr(declared[key]) if key in declared else "left out"
            yield Problem(
                (flag,), f"{path}: {key} is {found}", allowed, reason, "Mount JuiceFS that way and declare it."
            )


RULES = (declared_mount_is_safe,)
