"""Rule on the content of --megatron-config-path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vime.settings.groups import Settings
from vime.settings.passed_on import listed_megatron_flags, nearest, own_flag_names
from vime.settings.rules.config_files import read_table, tables, unknown_keys
from vime.settings.rules.megatron import SIZES
from vime.settings.rules.problem import Problem
from vime.settings.rules.quantities import has_critic


def roles_are_overridden_once(settings: Settings) -> Iterator[Problem]:
    """YAML: `megatron: [{name, role, overrides}]`. The reference sets unknown keys and ignores GPU counts."""
    flag, path = "--megatron-config-path", settings.trainer.megatron_config_path
    if path is None:
        return
    content = read_table(flag, path)
    entries = content if isinstance(content, Problem) else tables(flag, path, content, "megatron")
    if isinstance(entries, Problem):
        yield entries
        return
    seen: set[str] = set()
    for number, entry in enumerate(entries, start=1):
        where = f"{path}: entry {number}"
        yield from unknown_keys(flag, where, entry, ("name", "role", "overrides", "args"))
        yield from _role_problems(settings, flag, where, entry.get("role"), seen)
        overrides = entry.get("overrides", entry.get("args")) or {}
        if not isinstance(overrides, dict):
            yield Problem((flag,), f"{where}: overrides is {overrides!r}", "a table", "", "Correct the file.")
            continue
        for key in overrides:
            yield from _override_problems(flag, where, key)


def _role_problems(settings: Settings, flag: str, where: str, role: Any, seen: set[str]) -> Iterator[Problem]:
    if role not in ("actor", "critic"):
        yield Problem((flag,), f"{where}: role is {role!r}", "actor, critic", "", "Correct the role.")
    elif role in seen:
        yield Problem((flag,), f"{where}: role {role} is there twice", "one entry a role", "", "Merge the entries.")
    elif role == "critic" and not has_critic(settings):
        estimator = settings.objective.advantage_estimator
        yield Problem(
            (flag, "--advantage-estimator"),
            f"{where}: role critic with --advantage-estimator {estimator}",
            "ppo",
            "Only ppo has a critic.",
            "Remove the entry.",
        )
    seen.add(str(role))


def _override_problems(flag: str, where: str, key: str) -> Iterator[Problem]:
    name = "--" + key.replace("_", "-")
    known = {*listed_megatron_flags(), *own_flag_names()}
    if name in SIZES or key in ("num_nodes", "num_gpus_per_node"):
        yield Problem(
            (flag,),
            f"{where}: {key} in overrides",
            "left out",
            "Actor and critic share their GPUs and have the same parallel layout.",
            "Give it on the command line, for both.",
        )
    elif name not in known:
        yield Problem(
            (flag,),
            f"{where}: {key} in overrides",
            "flags of vime and Megatron, with underscores",
            f"The nearest one is {nearest(name, known)[2:].replace('-', '_')}.",
            "Correct the key.",
        )


RULES = (roles_are_overridden_once,)
