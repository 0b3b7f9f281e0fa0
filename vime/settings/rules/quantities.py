"""Numbers and facts that several rules derive from the settings."""

from __future__ import annotations

from collections.abc import Sequence

from vime.settings.groups import Settings

FULLY_ASYNC = "vime.rollout.fully_async_rollout.generate_rollout_fully_async"


def num_rollout_gpus(settings: Settings) -> int:
    """GPUs that vime's own engines need; under --colocate as many as train, when left out."""
    cluster = settings.cluster
    if settings.engine.rollout_external_engine_addrs is not None or settings.objective.is_supervised:
        return 0
    if cluster.colocate and cluster.rollout_num_gpus is None:
        return cluster.num_trainer_ranks
    return cluster.num_rollout_gpus


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
