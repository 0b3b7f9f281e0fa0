"""What the settings' objective needs of a sample before the queue takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.preview.parameters import routed_layers
from storage.checks import EnqueueRequirements
from storage.route_checks import RouteShape
from vime.errors import ModelError
from vime.settings.groups import Settings
from vime.settings.rules.quantities import context_parallel_size


def enqueue_needs(settings: Settings, hf_config: Mapping[str, Any]) -> EnqueueRequirements:
    """Requirements of a run whose model has this `config.json`.

    Raises:
        ModelError: routing replay with a model without experts, or whose config lacks a size.
    """
    objective, trainer, top_p = settings.objective, settings.trainer, settings.rollout.rollout_top_p
    limit = trainer.max_tokens_per_gpu if trainer.use_dynamic_batch_size else None
    return EnqueueRequirements(
        sampled=not objective.is_supervised,
        routes=route_shape(hf_config) if objective.use_rollout_routing_replay else None,
        sc_top_k=objective.score_centering_top_k if objective.use_score_centering and top_p == 1 else None,
        top_p=top_p < 1,
        teacher=objective.use_opd and objective.opd_type == "vllm",
        max_tokens=None if limit is None else limit * context_parallel_size(settings),
        vocab_size=hf_config.get("vocab_size"),
    )


def route_shape(hf_config: Mapping[str, Any]) -> RouteShape:
    """Shape of the routes of a model with experts; layers without experts have none."""
    layers, top_k, experts = routed_layers(hf_config)
    if not layers:
        raise ModelError(
            f"config.json: a model of type {hf_config.get('model_type')!r} has no experts, but "
            "--use-rollout-routing-replay is given.",
            next_step="Leave out --use-rollout-routing-replay.",
        )
    return RouteShape(layers, top_k, experts)
