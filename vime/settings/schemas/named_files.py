"""The structured files that settings name, all at once."""

from __future__ import annotations

from typing import Any

from vime.settings.extra_args import flags_added_by
from vime.settings.groups import GROUPS, Settings
from vime.settings.passed_on import listed_megatron_names
from vime.settings.schemas.eval_config import eval_config_problems, read_eval_config
from vime.settings.schemas.megatron_config import check_megatron_config, megatron_config_problems
from vime.settings.schemas.vllm_config import read_vllm_config, vllm_config_problems, vllm_config_warnings


def check_named_files(settings: Settings) -> list[str]:
    """Read the files of --megatron-config-path, --vllm-config and --eval-config; the warnings.

    Raises:
        SettingsError: one of them is wrong; with the file and the place in it.
    """
    megatron, vllm, evaluation = _paths(settings)
    warnings = [] if megatron is None else check_megatron_config(megatron, _arguments(settings))
    if vllm is not None:
        warnings += vllm_config_warnings(vllm, read_vllm_config(vllm, settings))
    if evaluation is not None:
        read_eval_config(evaluation)
    return warnings


def named_file_problems(settings: Settings) -> list[str]:
    """Errors and warnings of these files, a sentence each, all files even when one is wrong."""
    megatron, vllm, evaluation = _paths(settings)
    problems = [] if megatron is None else megatron_config_problems(megatron, _arguments(settings))
    problems += [] if vllm is None else vllm_config_problems(vllm, settings)
    return problems + ([] if evaluation is None else eval_config_problems(evaluation))


def _arguments(settings: Settings) -> dict[str, Any]:
    """Every argument's name with its value, None for those that only Megatron knows."""
    path = settings.trainer.extra_args_provider_path
    names = {*listed_megatron_names(), *(() if path is None else flags_added_by(path).values())}
    values: dict[str, Any] = dict.fromkeys(names)
    for group in GROUPS:
        values |= vars(vars(settings)[group])
    return values


def _paths(settings: Settings) -> tuple[str | None, str | None, str | None]:
    return settings.trainer.megatron_config_path, settings.engine.vllm_config, settings.evaluation.eval_config
