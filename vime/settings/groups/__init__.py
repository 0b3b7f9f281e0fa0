"""The settings tree: one frozen dataclass a group, one field a documented flag."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

from vime.settings.flag import Flag, flags_of
from vime.settings.groups.checkpoint import CheckpointSettings
from vime.settings.groups.cluster import ClusterSettings
from vime.settings.groups.command import CommandSettings
from vime.settings.groups.data import DataSettings
from vime.settings.groups.debug import DebugSettings
from vime.settings.groups.engine import EngineSettings
from vime.settings.groups.evaluation import EvaluationSettings
from vime.settings.groups.logging import LoggingSettings
from vime.settings.groups.objective import ObjectiveSettings
from vime.settings.groups.queue import QueueSettings
from vime.settings.groups.rollout import RolloutSettings
from vime.settings.groups.router import ModelRouter, RouterSettings
from vime.settings.groups.trainer import TrainerSettings
from vime.settings.groups.weights import WeightSettings

__all__ = [
    "GROUPS",
    "CheckpointSettings",
    "ClusterSettings",
    "CommandSettings",
    "DataSettings",
    "DebugSettings",
    "EngineSettings",
    "EvaluationSettings",
    "LoggingSettings",
    "ModelRouter",
    "ObjectiveSettings",
    "QueueSettings",
    "RolloutSettings",
    "RouterSettings",
    "Settings",
    "TrainerSettings",
    "WeightSettings",
    "all_flags",
]


@dataclass(frozen=True)
class Settings:
    """Everything a run is started with."""

    checkpoint: CheckpointSettings
    data: DataSettings
    rollout: RolloutSettings
    objective: ObjectiveSettings
    trainer: TrainerSettings
    cluster: ClusterSettings
    engine: EngineSettings
    router: RouterSettings
    weights: WeightSettings
    queue: QueueSettings
    evaluation: EvaluationSettings
    debug: DebugSettings
    logging: LoggingSettings
    command: CommandSettings
    vllm_args: tuple[str, ...] = ()
    """`--vllm-*` flags as given."""
    router_args: tuple[str, ...] = ()
    """`--router-*` flags as given."""
    megatron_args: tuple[str, ...] = ()
    """Flags that are neither vime's nor vLLM's nor the router's, as given."""
    model_routers: tuple[ModelRouter, ...] = ()
    """Routers of the served models, that of the trained one first; no flag, but known once they run."""

    def with_routers(self, routers: tuple[ModelRouter, ...]) -> Settings:
        """The same settings in a run whose routers have started."""
        if not routers:
            return self
        first = RouterSettings(routers[0].host, routers[0].port)
        return dataclasses.replace(self, router=first, model_routers=routers)


GROUPS: dict[str, type] = {
    "checkpoint": CheckpointSettings,
    "data": DataSettings,
    "rollout": RolloutSettings,
    "objective": ObjectiveSettings,
    "trainer": TrainerSettings,
    "cluster": ClusterSettings,
    "engine": EngineSettings,
    "router": RouterSettings,
    "weights": WeightSettings,
    "queue": QueueSettings,
    "evaluation": EvaluationSettings,
    "debug": DebugSettings,
    "logging": LoggingSettings,
    "command": CommandSettings,
}
"""Attribute of `Settings` -> its group, in the order of the help."""


@functools.cache
def all_flags() -> Mapping[str, tuple[str, Flag]]:
    """Field name -> its group's name and its flag. Field names are unique across groups."""
    return {described.field: (name, described) for name, group in GROUPS.items() for described in flags_of(group)}
