"""Rule on the content of --vllm-config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vime.settings.groups import Settings
from vime.settings.rules.config_files import read_table, tables, unknown_keys
from vime.settings.rules.problem import Problem

_WORKER_TYPES = ("regular", "prefill", "decode", "placeholder")


def server_groups_are_whole(settings: Settings) -> Iterator[Problem]:
    """YAML: `vllm: [{name, model_path, update_weights, server_groups: [...]}]`."""
    flag, path = "--vllm-config", settings.engine.vllm_config
    if path is None:
        return
    content = read_table(flag, path)
    models = content if isinstance(content, Problem) else tables(flag, path, content, "vllm")
    if isinstance(models, Problem):
        yield models
        return
    updated = [str(model.get("name")) for model in models if model.get("update_weights", True)]
    if len(updated) != 1:
        yield Problem(
            (flag,),
            f"{path}: {len(updated)} models get new weights ({', '.join(updated) or 'none'})",
            "one",
            "The trainer trains one model.",
            "Give update_weights: false to the others.",
        )
    for model in models:
        where = f"{path}: model {model.get('name')!r}"
        yield from unknown_keys(flag, where, model, ("name", "model_path", "update_weights", "server_groups"))
        groups = tables(flag, where, model, "server_groups")
        if isinstance(groups, Problem):
            yield groups
            continue
        for group in groups:
            yield from _group_problems(flag, where, group)


def _group_problems(flag: str, where: str, group: dict[str, Any]) -> Iterator[Problem]:
    yield from unknown_keys(flag, where, group, ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides"))
    kind = group.get("worker_type")
    if kind not in _WORKER_TYPES:
        yield Problem((flag,), f"{where}: worker_type is {kind!r}", ", ".join(_WORKER_TYPES), "", "Correct the file.")
    gpus, per_engine = group.get("num_gpus"), group.get("num_gpus_per_engine", 1)
    if not isinstance(gpus, int) or not isinstance(per_engine, int) or per_engine < 1 or gpus < 1 or gpus % per_engine:
        yield Problem(
            (flag,),
            f"{where}: num_gpus is {gpus!r}, num_gpus_per_engine is {per_engine!r}",
            "whole numbers, the first a multiple of the second",
            "Engines of a group are equal.",
            "Correct the file.",
        )


RULES = (server_groups_are_whole,)
