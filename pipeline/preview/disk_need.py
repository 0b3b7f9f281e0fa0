"""Bytes on disk: of one checkpoint, and of the samples of one rollout batch at their greatest length. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.preview.parameters import count_parameters, routed_layers
from pipeline.preview.passed_value import passed_value
from vime.settings.groups import Settings
from vime.settings.rules.quantities import has_critic

MODEL_BYTES = {"fp32": 4, "bf16": 2}
ADAM_BYTES = 8
"""Two float32 moments a parameter."""
MASTER_BYTES = 4
"""Float32 copy of a parameter whose model copy is narrower."""
HEADER_BYTES = 1024
"""Allowance a sample for the header, and for scalars, ids and metadata among its packed fields."""
TEXT_BYTES = 4
"""Allowance a token for the texts of prompt and response."""
TRAINER_BYTES = 4
"""The trainer's log-probability of a response token, in the token log."""


@dataclass(frozen=True)
class ColumnNeed:
    """One stored column: its bytes for each token of the whole sequence and for each token of the response."""

    name: str
    bytes_per_token: int
    bytes_per_response_token: int

    def bytes_of(self, total: int, response: int) -> int:
        return total * self.bytes_per_token + response * self.bytes_per_response_token


@dataclass(frozen=True)
class DiskNeed:
    """Bytes; samples at the greatest length that the settings allow."""

    parameters: int
    checkpoint_bytes: int
    num_commits: int
    """Commits of a whole run; all are kept."""
    longest_sequence: int | None
    """Prompt and response in tokens; None: nothing limits the prompt."""
    longest_response: int
    columns: tuple[ColumnNeed, ...]
    sample_bytes: int
    rollout_bytes: int
    run_bytes: int
    """All commits and all samples that are kept: on disk all of them unless --rollout-queue-online-gc is given, in
    memory two batches, which may be spilled."""

    @property
    def to_begin_bytes(self) -> int:
        """One commit and one rollout batch."""
        return self.checkpoint_bytes + self.rollout_bytes


def disk_need(settings: Settings, hf_config: Mapping[str, Any]) -> DiskNeed:
    """What a run writes.

    Raises:
        ModelError: `config.json` lacks a size.
    """
    parameters = count_parameters(hf_config)
    saved = parameters + (_critic_parameters(hf_config) if has_critic(settings) else 0)
    checkpoint = saved * _bytes_per_parameter(settings)
    longest = longest_sequence(settings, hf_config)
    response = settings.rollout.rollout_max_response_len or 0
    if longest is not None:
        response = min(response, longest)
    columns = sample_columns(settings, hf_config)
    total = response if longest is None else longest
    sample = HEADER_BYTES + total * TEXT_BYTES + sum(column.bytes_of(total, response) for column in columns)
    if not settings.queue.is_in_memory:
        sample += response * TRAINER_BYTES
    rollout = sample * settings.data.samples_per_rollout
    num_rollout = settings.data.num_rollout or 0
    interval = 1 if settings.cluster.release_train else settings.checkpoint.save_interval
    commits = 1 if interval is None else -(-num_rollout // interval)
    reclaims = settings.queue.rollout_queue_online_gc or settings.queue.is_in_memory
    kept = min(num_rollout, 2) if reclaims else num_rollout
    return DiskNeed(
        parameters=parameters,
        checkpoint_bytes=checkpoint,
        num_commits=commits,
        longest_sequence=longest,
        longest_response=response,
        columns=columns,
        sample_bytes=sample,
        rollout_bytes=rollout,
        run_bytes=commits * checkpoint + kept * rollout,
    )


def sample_columns(settings: Settings, hf_config: Mapping[str, Any]) -> tuple[ColumnNeed, ...]:
    """Columns of a stored sample, as `storage.columns` lays them out, with routes and sampler heads when asked for."""
    columns = [
        ColumnNeed("tokens", 4, 0),
        ColumnNeed("loss_mask", 0, 1),
        ColumnNeed("sampler_log_probs", 0, 4),
    ]
    objective = settings.objective
    layers, top_k, experts = routed_layers(hf_config)
    if objective.use_rollout_routing_replay and layers:
        columns.append(ColumnNeed("routes", layers * top_k * (1 if experts <= 256 else 2), 0))
    if objective.use_score_centering:
        width = 2 if settings.queue.rollout_queue_sc_dtype == "float16" else 4
        columns.append(ColumnNeed("top_k_ids", 0, objective.score_centering_top_k * 4))
        columns.append(ColumnNeed("top_k_log_probs", 0, objective.score_centering_top_k * width))
    return tuple(columns)


def _critic_parameters(hf_config: Mapping[str, Any]) -> int:
    """The same model with one number for a token, and its bias, in place of logits."""
    return count_parameters({**hf_config, "tie_word_embeddings": True}) + int(hf_config["hidden_size"]) + 1


def _bytes_per_parameter(settings: Settings) -> int:
    precision = "bf16" if "--bf16" in settings.megatron_args else "fp32"
    weights = MODEL_BYTES[precision]
    if settings.checkpoint.no_save_optim or settings.trainer.use_stateless_adam:
        return weights
    return weights + ADAM_BYTES + (MASTER_BYTES if precision != "fp32" else 0)


def longest_sequence(settings: Settings, hf_config: Mapping[str, Any]) -> int | None:
    """The least of what limits prompt and response together: flags, the engine's length, the model's positions."""
    rollout, prompt = settings.rollout, settings.data.rollout_max_prompt_len
    limits = [rollout.rollout_max_context_len, hf_config.get("max_position_embeddings")]
    if prompt is not None:
        limits.append(prompt + (rollout.rollout_max_response_len or 0))
    engine = passed_value(settings.vllm_args, "--vllm-max-model-len")
    if engine is not None and engine.isdigit():
        limits.append(int(engine))
    known = [limit for limit in limits if isinstance(limit, int)]
    return min(known) if known else None
