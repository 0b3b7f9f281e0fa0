"""The structured files that settings name, all at once."""

from __future__ import annotations

from vime.settings.groups import Settings
from vime.settings.schemas.eval_config import eval_config_problems, read_eval_config
from vime.settings.schemas.megatron_config import (
    megatron_config_problems,
    megatron_config_warnings,
    read_megatron_config,
)
from vime.settings.schemas.vllm_config import read_vllm_config, vllm_config_problems, vllm_config_warnings


def check_named_files(settings: Settings) -> list[str]:
    """Read the files of --megatron-config-path, --vllm-config and --eval-config; the warnings.

    Raises:
        SettingsError: one of them is wrong; with the file and the place in it.
    """
    megatron, vllm, evaluation = _paths(settings)
    warnings = [] if megatron is None else megatron_config_warnings(megatron, read_megatron_config(megatron))
    if vllm is not None:
        warnings += vllm_config_warnings(vllm, read_vllm_config(vllm, settings))
    if evaluation is not None:
        read_eval_config(evaluation)
    return warnings


def named_file_problems(settings: Settings) -> list[str]:
    """Errors and warnings of these files, a sentence each, all files even when one is wrong."""
    megatron, vllm, evaluation = _paths(settings)
    problems = [] if megatron is None else megatron_config_problems(megatron)
    problems += [] if vllm is None else vllm_config_problems(vllm, settings)
    return problems + ([] if evaluation is None else eval_config_problems(evaluation))


def _paths(settings: Settings) -> tuple[str | None, str | None, str | None]:
    return settings.trainer.megatron_config_path, settings.engine.vllm_config, settings.evaluation.eval_config
