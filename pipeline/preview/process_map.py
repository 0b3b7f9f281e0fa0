"""Which process gets which device: trainer ranks, inference engines, and who shares with whom. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.preview.passed_value import passed_value
from vime.errors import SettingsError
from vime.settings.groups import Settings
from vime.settings.machine import Node
from vime.settings.placement import Demand, NoRoom, place
from vime.settings.rules.quantities import (
    demand_of,
    engine_kinds,
    has_critic,
    num_rollout_gpus,
    trains_only,
)
from vime.settings.served_models import EngineKind

Shape = Literal["separate", "colocated", "external engines", "generation only", "training only"]


@dataclass(frozen=True)
class Machines:
    """The devices to plan for. `kind` is "GPU", or "worker process" where there is no CUDA."""

    num_devices: int
    devices_per_node: int
    kind: str
    assumed: bool = False


@dataclass(frozen=True)
class Device:
    """One GPU (or slot) of one node, both counted from 0."""

    node: int
    gpu: int

    def __str__(self) -> str:
        return f"{self.node}:{self.gpu}"


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the trainer's process groups; tensor x context x data x pipeline is the number of ranks."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int


@dataclass(frozen=True)
class TrainerPlace:
    """One rank: its device and its coordinates in the process groups."""

    rank: int
    device: Device
    tensor: int
    context: int
    data: int
    pipeline: int


@dataclass(frozen=True)
class EnginePlace:
    """One engine: its devices in the order of its workers, or the address of an engine of others."""

    number: int
    devices: tuple[Device, ...]
    address: str | None = None
    kind: EngineKind = "regular"


@dataclass(frozen=True)
class ProcessMap:
    """Who runs where. `num_devices` is what must be there; `words` says in a sentence how devices are shared."""

    shape: Shape
    words: str
    kind: str
    num_devices: int
    sizes: ParallelSizes
    trainers: tuple[TrainerPlace, ...]
    engines: tuple[EnginePlace, ...]
    critic: bool

    @property
    def engines_across_nodes(self) -> list[int]:
        """Engines whose workers lie on more than one node."""
        return [engine.number for engine in self.engines if len({device.node for device in engine.devices}) > 1]


def assumed_machines(settings: Settings, num_gpus: int) -> Machines:
    """A cluster of `num_gpus` GPUs in nodes as large as the allocation flags say."""
    cluster = settings.cluster
    per_node = cluster.actor_num_gpus_per_node if cluster.colocate else cluster.num_gpus_per_node
    return Machines(num_gpus, min(per_node, num_gpus), "GPU", assumed=True)


def map_processes(settings: Settings, machines: Machines) -> ProcessMap:
    """Place the run's processes as a start would (`vime.settings.placement`).

    Where they don't all fit, devices are numbered on: ranks first, engines behind them or, colocated, from 0 too. With
    engines of others, or when only one half runs, the other half has no device.

    Raises:
        SettingsError: the trainer's ranks are no multiple of tensor x context x pipeline size.
    """
    cluster = settings.cluster
    shape = _shape(settings)
    num_ranks = 0 if shape == "generation only" else cluster.num_trainer_ranks
    num_rollout = 0 if shape == "training only" else num_rollout_gpus(settings)
    sizes = parallel_sizes(settings.megatron_args, cluster.num_trainer_ranks)
    ranks, workers = _devices(machines, demand_of(settings))
    kinds = engine_kinds(settings)
    engines = [EnginePlace(number, devices, kind=kinds[number]) for number, devices in enumerate(workers)]
    if shape == "external engines":
        addresses = settings.engine.rollout_external_engine_addrs or ()
        engines = [EnginePlace(number, (), address) for number, address in enumerate(addresses)]
    return ProcessMap(
        shape=shape,
        words=_words(settings, shape),
        kind=machines.kind,
        num_devices=max(num_ranks, num_rollout) if shape == "colocated" else num_ranks + num_rollout,
        sizes=sizes,
        trainers=tuple(_place(rank, device, sizes) for rank, device in enumerate(ranks)),
        engines=tuple(engines),
        critic=has_critic(settings),
    )


def parallel_sizes(megatron_args: Sequence[str], num_ranks: int) -> ParallelSizes:
    """Sizes from Megatron's flags; the data-parallel size is what is left of `num_ranks`.

    Raises:
        SettingsError: a size isn't a positive number, or doesn't divide the ranks.
    """
    tensor = _megatron_size(megatron_args, "--tensor-model-parallel-size")
    pipeline = _megatron_size(megatron_args, "--pipeline-model-parallel-size")
    context = _megatron_size(megatron_args, "--context-parallel-size")
    if num_ranks % (tensor * pipeline * context):
        raise SettingsError(
            f"{num_ranks} trainer ranks, but tensor {tensor} x pipeline {pipeline} x context {context} = "
            f"{tensor * pipeline * context}; allowed: a multiple of that.",
            next_step="Change --actor-num-gpus-per-node or a parallel size.",
        )
    expert = _megatron_size(megatron_args, "--expert-model-parallel-size")
    return ParallelSizes(tensor, context, num_ranks // (tensor * pipeline * context), pipeline, expert)


def _megatron_size(words: Sequence[str], flag: str) -> int:
    """The size that `flag` gives; 1 when it is absent."""
    given = passed_value(words, flag)
    size = "1" if given is None else given
    if not (size.isascii() and size.isdigit() and int(size) > 0):
        raise SettingsError(f"{flag} is {size!r}, allowed: 1 or more.", next_step="Correct the value.")
    return int(size)


def _devices(machines: Machines, demand: Demand) -> tuple[list[Device], list[tuple[Device, ...]]]:
    """Those of the ranks, and of each engine's workers."""
    whole, rest = divmod(machines.num_devices, machines.devices_per_node)
    sizes = [machines.devices_per_node] * whole + [rest] * (rest > 0)
    placed = place([Node(f"node {number}", size) for number, size in enumerate(sizes)], demand)
    if isinstance(placed, NoRoom):
        return _numbered(machines.devices_per_node, demand)
    ranks = [Device(placed.shares[seat.share].number, seat.device) for seat in placed.trainers]
    engines = [
        tuple(Device(placed.shares[seat.share].number, seat.device) for seat in seats) for seats in placed.engines
    ]
    return ranks, engines


def _numbered(per_node: int, demand: Demand) -> tuple[list[Device], list[tuple[Device, ...]]]:
    num_ranks = sum(demand.trainer_nodes)
    everyone = [Device(number // per_node, number % per_node) for number in range(num_ranks + sum(demand.engines))]
    first = itertools.accumulate(demand.engines, initial=0 if demand.shared else num_ranks)
    engines = [tuple(everyone[start : start + width]) for start, width in zip(first, demand.engines, strict=False)]
    return everyone[:num_ranks], engines


def _place(rank: int, device: Device, sizes: ParallelSizes) -> TrainerPlace:
    """Megatron counts tensor ranks fastest, then context, data, pipeline."""
    rest, tensor = divmod(rank, sizes.tensor)
    rest, context = divmod(rest, sizes.context)
    pipeline, data = divmod(rest, sizes.data)
    return TrainerPlace(rank, device, tensor, context, data, pipeline)


def _shape(settings: Settings) -> Shape:
    if trains_only(settings) or settings.objective.is_supervised:
        return "training only"
    if settings.engine.rollout_external_engine_addrs:
        return "external engines"
    if settings.debug.debug_rollout_only:
        return "generation only"
    return "colocated" if settings.cluster.colocate else "separate"


def _words(settings: Settings, shape: Shape) -> str:
    cluster = settings.cluster
    said = {
        "separate": "Trainer ranks and engines have devices of their own and run at the same time.",
        "colocated": "Trainer ranks and engines share devices and take turns.",
        "external engines": "Trainer ranks run here, the engines are those of others.",
        "generation only": "Engines only; nothing is trained.",
        "training only": "Trainer ranks only; nothing is generated.",
    }[shape]
    if cluster.release_train:
        said += " The trainer's processes end during generation and start from a checkpoint for each step."
    elif cluster.trainer_leaves_memory:
        said += " The trainer leaves the devices' memory while engines generate."
    if cluster.engines_leave_memory:
        said += " Engines sleep while the trainer trains."
    return said
