"""Numbers and facts that several rules derive from the settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from vime.errors import SettingsError
from vime.settings.groups import Settings
from vime.settings.placement import Demand
from vime.settings.served_models import EngineKind, EngineSpec, engine_specs

FULLY_ASYNC = "vime.rollout.fully_async_rollout.generate_rollout_fully_async"
STREAMS = ("vime.rollout.vllm_rollout.generate_rollout", FULLY_ASYNC)
"""Values of --rollout-function-path that stand for vime's own stream of groups."""


@dataclass(frozen=True)
class EngineWorkers:
    """Sizes whose product is the number of workers of one engine."""

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    prefill_context: int = 1

    @property
    def total(self) -> int:
        return self.tensor * self.data * self.pipeline * self.prefill_context


def num_rollout_gpus(settings: Settings) -> int:
    """GPUs that vime's own engines need, and those that --vllm-config keeps free of engines."""
    if settings.engine.rollout_external_engine_addrs is not None or settings.objective.is_supervised:
        return 0
    if settings.engine.vllm_config is not None:
        return sum(spec.num_gpus for spec in own_engines(settings))
    return settings.cluster.num_rollout_gpus


def own_engines(settings: Settings) -> tuple[EngineSpec, ...]:
    """The engines that vime starts, placeholders included; none by a file that can't be read, as another rule says."""
    others = settings.engine.rollout_external_engine_addrs is not None
    if others or settings.objective.is_supervised or trains_only(settings):
        return ()
    with suppress(SettingsError):
        return engine_specs(settings, settings.cluster.num_rollout_gpus)
    return ()


def num_own_engines(settings: Settings) -> int:
    """Engines that vime starts."""
    return sum(spec.kind != "placeholder" for spec in own_engines(settings))


def engines_are_others(settings: Settings) -> bool:
    """Whether someone else starts the engines: at given addresses, or registered with the router."""
    if settings.objective.is_supervised or trains_only(settings):
        return False
    return settings.engine.rollout_external_engine_addrs is not None or settings.cluster.rollout_num_gpus == 0


def demand_of(settings: Settings) -> Demand:
    """The devices that the run asks for."""
    cluster = settings.cluster
    num_nodes = 0 if debug_mode(settings) == "--debug-rollout-only" else cluster.actor_num_nodes
    engines = own_engines(settings)
    return Demand(
        trainer_nodes=(cluster.actor_num_gpus_per_node,) * num_nodes,
        engines=tuple(spec.num_gpus for spec in engines),
        shared=cluster.colocate,
        engines_per_node=None if cluster.colocate else cluster.num_gpus_per_node,
    )


def engine_kinds(settings: Settings) -> tuple[EngineKind, ...]:
    """What each of vime's own engines does: those that only prefill come first."""
    return tuple(spec.kind for spec in own_engines(settings))


def engine_workers(spec: EngineSpec) -> EngineWorkers:
    """How the GPUs of one engine are shared out; the tensor size is what remains after the others."""
    sizes = [size(spec.vllm_args, f"--vllm-{name}-parallel-size") for name in ("data", "pipeline", "prefill-context")]
    return EngineWorkers(spec.tensor_size or max(1, spec.num_gpus // math.prod(sizes)), *sizes)


def trains_only(settings: Settings) -> bool:
    """Whether stored samples are trained without engines."""
    return settings.debug.trains_only


def debug_mode(settings: Settings) -> str | None:
    """The flag of the debug mode that is on."""
    debug = settings.debug
    if debug.debug_rollout_only:
        return "--debug-rollout-only"
    if debug.debug_train_only:
        return "--debug-train-only"
    return "--load-debug-rollout-data" if debug.load_debug_rollout_data is not None else None


def has_critic(settings: Settings) -> bool:
    return settings.objective.advantage_estimator == "ppo"


def uses_reference_model(settings: Settings) -> bool:
    return settings.objective.kl_coef != 0 or settings.objective.use_kl_loss


def is_stream(settings: Settings) -> bool:
    """Whether groups are one stream, rather than rollouts that a function makes one after another.

    Functions on whole rollouts, kept and rejected groups together, need the latter.
    """
    rollout = settings.rollout
    return rollout.rollout_function_path in STREAMS and rollout.rollout_all_samples_process_path is None


def is_fully_async(settings: Settings) -> bool:
    return settings.rollout.rollout_function_path == FULLY_ASYNC or settings.weights.flush_cache_interval != 1


def option(words: Sequence[str], flag: str) -> str | None:
    """Value of a passed-on flag (the last one wins), "" for a bare switch, None when it isn't there."""
    found = None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") != flag:
            continue
        follows = words[index + 1] if index + 1 < len(words) else "--"
        found = value if equals else "" if follows.startswith("--") else follows
    return found


def records_memory(settings: Settings) -> bool:
    """Whether trainer ranks record what they allocate."""
    debug = settings.debug
    asked = debug.memory_snapshot_num_steps is not None or debug.memory_recorder != "torch"
    return asked or option(settings.megatron_args, "--record-memory-history") is not None


def size(words: Sequence[str], flag: str) -> int:
    """A passed-on parallel size; 1 when it is left out or not a whole number above 0 (another rule says so)."""
    value = option(words, flag)
    return int(value) if value is not None and value.isascii() and value.isdigit() and int(value) > 0 else 1


def context_parallel_size(settings: Settings) -> int:
    return size(settings.megatron_args, "--context-parallel-size")


def model_parallel_size(settings: Settings) -> int:
    """Ranks that hold one replica of the trained model: tensor x pipeline x context."""
    tensor = size(settings.megatron_args, "--tensor-model-parallel-size")
    pipeline = size(settings.megatron_args, "--pipeline-model-parallel-size")
    return tensor * pipeline * context_parallel_size(settings)


def data_parallel_size(settings: Settings) -> int:
    """Replicas of the trained model."""
    return max(1, settings.cluster.num_trainer_ranks // model_parallel_size(settings))


def longest_sequence(settings: Settings) -> int:
    """Tokens that prompt and response may have together, as far as limits are given."""
    rollout = settings.rollout
    total = (settings.data.rollout_max_prompt_len or 0) + (rollout.rollout_max_response_len or 0)
    return total if rollout.rollout_max_context_len is None else min(total, rollout.rollout_max_context_len)
