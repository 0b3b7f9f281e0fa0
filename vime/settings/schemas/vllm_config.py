"""`--vllm-config`: the models that are served and their groups of engines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from vime.settings.groups import Settings
from vime.settings.owned_options import OWNED_VLLM_OPTIONS
from vime.settings.schemas.typed_yaml import Strict, read_typed, refuse

FLAG = "--vllm-config"

PARALLEL_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "data_parallel_size",
)
"""Sizes whose product is the number of GPUs of one engine; a group may override them, the tensor size included."""


class ServerGroup(Strict, frozen=True):
    """Engines of one kind. A placeholder keeps GPUs free of engines.

    `num_gpus` counts all engines of the group, `num_gpus_per_engine` None means --rollout-num-gpus-per-engine, and
    `overrides` are fields of vLLM's EngineArgs, set over the `--vllm-*` flags.
    """

    worker_type: Literal["regular", "prefill", "decode", "placeholder"]
    num_gpus: int
    num_gpus_per_engine: int | None = None
    overrides: dict[str, Any] = msgspec.field(default_factory=dict)


class ServedModel(Strict, frozen=True):
    """One model with its own router. `model_path` None means --hf-checkpoint."""

    name: str
    server_groups: list[ServerGroup]
    model_path: str | None = None
    update_weights: bool = True


class VllmConfig(Strict, frozen=True):
    """The file."""

    vllm: list[ServedModel]

    @property
    def num_gpus(self) -> int:
        """GPUs of all groups, placeholders included."""
        return sum(group.num_gpus for model in self.vllm for group in model.server_groups)

    @property
    def trained_model(self) -> ServedModel | None:
        """The model that receives weights: the first with `update_weights`."""
        return next((model for model in self.vllm if model.update_weights), None)


def read_vllm_config(path: str, settings: Settings) -> VllmConfig:
    """Read and check the file, with every `num_gpus_per_engine` filled in.

    Raises:
        SettingsError: as `read_typed`, a name twice, GPU counts that don't add up (to --rollout-num-gpus, when given),
            prefill without decode engines or the reverse, or an override of what vime sets itself.
    """
    config = read_typed(FLAG, path, VllmConfig)
    if not config.vllm:
        raise refuse(path, "vllm", "is empty, allowed: one model or more")
    default = settings.cluster.rollout_num_gpus_per_engine
    names: set[str] = set()
    models = []
    for index, model in enumerate(config.vllm):
        place = f"vllm[{index}]"
        if model.name in names:
            raise refuse(path, f"{place}.name", f"is {model.name!r} again, allowed: a name of its own")
        names.add(model.name)
        groups = [
            group
            if group.num_gpus_per_engine is not None
            else msgspec.structs.replace(group, num_gpus_per_engine=default)
            for group in model.server_groups
        ]
        models.append(msgspec.structs.replace(model, server_groups=groups))
        _check_groups(models[-1], path, place)
    given = settings.cluster.rollout_num_gpus
    filled = VllmConfig(models)
    if given is not None and given != filled.num_gpus:
        raise refuse(
            path,
            "the groups",
            f"have {filled.num_gpus} GPUs in all, but --rollout-num-gpus is {given}",
            "Change num_gpus of a group, add a placeholder group, or leave --rollout-num-gpus out.",
        )
    return filled


def vllm_config_warnings(path: str, config: VllmConfig) -> list[str]:
    """What is allowed and may surprise."""
    trained = config.trained_model
    return [
        f"{path}: vllm[{index}] {model.name!r} keeps its weights: only the first updatable model, "
        f"{trained.name!r}, is trained. Set update_weights: false to say so."
        for index, model in enumerate(config.vllm)
        if trained is not None and model.update_weights and model is not trained
    ]


def _check_groups(model: ServedModel, path: str, place: str) -> None:
    if not model.server_groups:
        raise refuse(path, f"{place}.server_groups", "is empty, allowed: one group or more")
    kinds = {group.worker_type for group in model.server_groups}
    for kind, other in (("prefill", "decode"), ("decode", "prefill")):
        if kind in kinds and other not in kinds:
            raise refuse(path, f"{place}.server_groups", f"has {kind} engines and no {other} engines, allowed: both")
    for index, group in enumerate(model.server_groups):
        _check_group(group, path, f"{place}.server_groups[{index}]")


def _check_group(group: ServerGroup, path: str, place: str) -> None:
    per_engine = 1 if group.num_gpus_per_engine is None else group.num_gpus_per_engine
    for key, value in (("num_gpus", group.num_gpus), ("num_gpus_per_engine", per_engine)):
        if value < 1:
            raise refuse(path, f"{place}.{key}", f"is {value}, allowed: 1 or more")
    if group.worker_type == "placeholder":
        if group.overrides:
            raise refuse(path, f"{place}.overrides", "is given for a placeholder, which has no engine")
        return
    if group.num_gpus % per_engine:
        raise refuse(path, f"{place}.num_gpus", f"is {group.num_gpus}, allowed: a multiple of {per_engine} per engine")
    for found, what in _refused_overrides(group.overrides):
        raise refuse(path, f"{place}.overrides.{found}", what)
    sizes = {key: value for key, value in group.overrides.items() if key.replace("-", "_") in PARALLEL_SIZES}
    for key, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise refuse(path, f"{place}.overrides.{key}", f"is {value!r}, allowed: a whole number above 0")
    product = math.prod(sizes.values())
    if "tensor_parallel_size" in {key.replace("-", "_") for key in sizes} and product != per_engine:
        raise refuse(path, f"{place}.overrides", f"have parallel sizes of {product} GPUs in all, allowed: {per_engine}")
    if per_engine % product:
        raise refuse(
            path, f"{place}.overrides", f"have parallel sizes of {product}, allowed: a divisor of {per_engine}"
        )


def _refused_overrides(overrides: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in overrides:
        name = key.replace("_", "-")
        if name in OWNED_VLLM_OPTIONS and name != "tensor-parallel-size":
            yield key, f"can't be set: vime sets it itself. {OWNED_VLLM_OPTIONS[name].rstrip('.')}"
