"""The engines that vime starts: of which models, on how many devices, with which options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vime.settings.groups import Settings
from vime.settings.schemas.vllm_config import PARALLEL_SIZES, ServedModel, ServerGroup, read_vllm_config

DEFAULT_MODEL = "default"
"""Name of the model that is trained, in a run without --vllm-config."""

EngineKind = Literal["regular", "prefill", "decode", "placeholder"]


@dataclass(frozen=True)
class EngineSpec:
    """One engine, or devices that are kept free of engines (`placeholder`).

    `vllm_args` are those of the command line with the overrides of its group, all as `--vllm-*` flags. `is_trained`
    says whether it receives the trainer's weights. `tensor_size` None leaves it to what remains of `num_gpus` after
    the other sizes.
    """

    model: str
    checkpoint: str
    num_gpus: int
    kind: EngineKind
    is_trained: bool
    vllm_args: tuple[str, ...]
    tensor_size: int | None = None


def engine_specs(settings: Settings, num_gpus: int) -> tuple[EngineSpec, ...]:
    """All engines in the order of their numbers; `num_gpus` are those of a run without --vllm-config.

    Raises:
        SettingsError: as `read_vllm_config`.
    """
    if settings.engine.vllm_config is not None:
        config = read_vllm_config(settings.engine.vllm_config, settings)
        trained = config.trained_model
        return tuple(
            spec
            for model in config.vllm
            for group in model.server_groups
            for spec in _of_group(settings, model, group, is_trained=model is trained)
        )
    per_engine, prefill = settings.cluster.rollout_num_gpus_per_engine, settings.engine.prefill_num_servers or 0
    other: EngineKind = "decode" if prefill else "regular"
    return tuple(
        EngineSpec(
            DEFAULT_MODEL,
            settings.checkpoint.hf_checkpoint or "",
            per_engine,
            "prefill" if number < prefill else other,
            True,
            settings.vllm_args,
        )
        for number in range(num_gpus // per_engine)
    )


def model_names(settings: Settings) -> tuple[str, ...]:
    """Names of the served models, that of the trained one first. Raises `SettingsError` as `read_vllm_config`."""
    if settings.engine.vllm_config is None:
        return (DEFAULT_MODEL,)
    config = read_vllm_config(settings.engine.vllm_config, settings)
    names = [model.name for model in config.vllm]
    trained = config.trained_model
    return tuple(sorted(names, key=lambda name: trained is None or name != trained.name))


def _of_group(settings: Settings, model: ServedModel, group: ServerGroup, *, is_trained: bool) -> Sequence[EngineSpec]:
    per_engine = group.num_gpus_per_engine or settings.cluster.rollout_num_gpus_per_engine
    overrides = {key.replace("-", "_"): value for key, value in group.overrides.items()}
    tensor_size = overrides.pop(PARALLEL_SIZES[0], None)
    sizes = [per_engine] * (group.num_gpus // per_engine)
    if rest := group.num_gpus % per_engine:
        sizes.append(rest)  # of a placeholder
    return [
        EngineSpec(
            model.name,
            model.model_path or settings.checkpoint.hf_checkpoint or "",
            num_gpus,
            group.worker_type,
            is_trained,
            (*settings.vllm_args, *_flags(overrides)),
            tensor_size,
        )
        for num_gpus in sizes
    ]


def _flags(overrides: Mapping[str, Any]) -> list[str]:
    """Fields of vLLM's EngineArgs as flags; None leaves a field to vLLM."""
    words = []
    for key, value in overrides.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--vllm-{name}" if value else f"--vllm-no-{name}")
        elif value is not None:
            words += [f"--vllm-{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words
