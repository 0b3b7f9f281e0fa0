"""Rules on who gets which GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from vime.settings.groups import ClusterSettings, Settings
from vime.settings.machine import Machine
from vime.settings.placement import NoRoom, place
from vime.settings.rules.problem import Problem, problem
from vime.settings.rules.quantities import demand_of, has_critic, num_rollout_gpus


def gpus_fill_engines(settings: Settings) -> Iterator[Problem]:
    """Engines are equal, so the GPUs that generate must be a multiple of one engine's."""
    per_engine = settings.cluster.rollout_num_gpus_per_engine
    gpus = num_rollout_gpus(settings)
    if settings.engine.vllm_config is None and gpus % per_engine:
        yield problem(
            settings,
            "--rollout-num-gpus --rollout-num-gpus-per-engine",
            found=f"--rollout-num-gpus is {gpus}, --rollout-num-gpus-per-engine is {per_engine}",
            allowed="a multiple",
            reason="Engines are equal.",
            next_step="Change one of the two.",
        )


def engines_fit_nodes(settings: Settings) -> Iterator[Problem]:
    """An engine fills a part of one node or several whole nodes; else its ranks straddle nodes unevenly."""
    per_engine, per_node = settings.cluster.rollout_num_gpus_per_engine, settings.cluster.num_gpus_per_node
    if num_rollout_gpus(settings) > per_node and per_engine % per_node and per_node % per_engine:
        yield problem(
            settings,
            "--rollout-num-gpus-per-engine --num-gpus-per-node",
            allowed=f"a divisor or a multiple of {per_node}",
            reason="An engine would straddle nodes unevenly.",
            next_step="Change one of the two.",
        )


def offload_is_consistent(settings: Settings) -> Iterator[Problem]:
    """--offload stands for both switches; an explicit --no- form of one contradicts it."""
    cluster = settings.cluster
    if not cluster.offload:
        return
    for name, value in (("train", cluster.offload_train), ("rollout", cluster.offload_rollout)):
        if value is False:
            yield problem(
                settings,
                f"--offload --offload-{name}",
                allowed="one of them",
                reason=f"--offload stands for --offload-train and --offload-rollout, --no-offload-{name} denies one.",
                next_step=f"Give only the other switch instead of --offload, or leave out --no-offload-{name}.",
            )


def ppo_offloads_the_trainer(settings: Settings) -> Iterator[Problem]:
    """Actor and critic take turns on the same GPUs, which needs offload; the reference overrides the user's no."""
    if has_critic(settings) and settings.cluster.offload_train is False:
        yield problem(
            settings,
            "--advantage-estimator --offload-train",
            allowed="--offload-train, or left out",
            reason="Actor and critic share their GPUs in turn, so each moves out of memory for the other.",
            next_step="Leave out --no-offload-train.",
        )


def engines_that_take_turns_are_own(settings: Settings) -> Iterator[Problem]:
    """Engines that someone else started have their own GPUs, and are put to sleep by nobody but their owner."""
    flag = _turns_flag(settings.cluster)
    if flag is not None and settings.engine.rollout_external_engine_addrs is not None:
        yield problem(
            settings,
            f"{flag} --rollout-external-engine-addrs",
            allowed="one of them",
            reason="Engines that someone else started don't run on the trainer's GPUs.",
            next_step=f"Leave out {flag}.",
        )


def _turns_flag(cluster: ClusterSettings) -> str | None:
    """The flag that makes engines share devices or sleep."""
    if cluster.colocate:
        return "--colocate"
    if not cluster.engines_leave_memory:
        return None
    return "--offload-rollout" if cluster.offload_rollout else "--offload"


def engines_that_take_turns_publish_each_batch(settings: Settings) -> Iterator[Problem]:
    """An interval between publications belongs to trainers that run ahead of the engines, on GPUs of their own."""
    flag = _turns_flag(settings.cluster)
    if flag is not None and settings.weights.update_weights_interval != 1:
        yield problem(
            settings,
            f"--update-weights-interval {flag}",
            allowed=f"1 with {flag}",
            reason="Trainer and engines take turns, so the engines wake up with the new weights each time.",
            next_step=f"Leave out --update-weights-interval, or {flag}.",
        )


def colocated_weights_reach_every_engine(settings: Settings) -> Iterator[Problem]:
    """Engines open the memory of the trainer's first rank, which is on one node."""
    cluster, weights = settings.cluster, settings.weights
    if cluster.colocate and cluster.actor_num_nodes > 1 and weights.update_weight_transport != "disk":
        yield problem(
            settings,
            "--colocate --actor-num-nodes --update-weight-transport",
            allowed="--update-weight-transport disk, or one node",
            reason="Colocated engines read the memory of the trainer's first rank, which another node's can't.",
            next_step="Give --update-weight-transport disk and --update-weight-disk-dir DIR.",
        )


def gpus_exist(settings: Settings, machine: Machine) -> Iterator[Problem]:
    """What can never be placed is refused at once, with need and have, instead of waiting for ever."""
    if machine.nodes is None:
        return
    demand = demand_of(settings)
    placed = place(machine.nodes, demand)
    if isinstance(placed, NoRoom):
        total = sum(node.gpus for node in machine.nodes)
        yield problem(
            settings,
            "--actor-num-nodes --actor-num-gpus-per-node --rollout-num-gpus --rollout-num-gpus-per-engine",
            found=f"The run needs {demand}",
            allowed=f"what fits {', '.join(map(str, machine.nodes)) or 'no node'} = {total}",
            reason=placed.words,
            next_step=placed.next_step,
        )


RULES = (
    gpus_fill_engines,
    engines_fit_nodes,
    offload_is_consistent,
    ppo_offloads_the_trainer,
    engines_that_take_turns_are_own,
    engines_that_take_turns_publish_each_batch,
    colocated_weights_reach_every_engine,
)
MACHINE_RULES = (gpus_exist,)
