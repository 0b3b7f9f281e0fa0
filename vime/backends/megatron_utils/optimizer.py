"""Megatron's gradient buffers, optimizer and learning-rate schedule, built by Megatron's own builders."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.training import (
    get_megatron_ddp_config,
    get_megatron_optimizer_config,
    get_optimizer_param_scheduler,
)

from vime.errors import RestoreError


@dataclass(frozen=True)
class Learner:
    """A model that can take optimizer steps."""

    model: Any
    """`DistributedDataParallel` around the model."""
    optimizer: Any
    scheduler: OptimizerParamScheduler

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(get_canonical_lr_for_logging(self.optimizer.param_groups) or 0.0)

    def sub_optimizers(self) -> list[Any]:
        """The optimizers behind Megatron's chain."""
        return list(self.optimizer.chained_optimizers)


def build_learner(model: torch.nn.Module, args: argparse.Namespace, config: TransformerConfig) -> Learner:
    """Wrap a model for data parallelism and give it an optimizer and a schedule that counts rollouts."""
    ddp = DistributedDataParallel(config, get_megatron_ddp_config(args), model)
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = ddp.no_sync
    optimizer_config, overrides = get_megatron_optimizer_config(args)
    optimizer = get_megatron_optimizer(
        optimizer_config, [ddp], config_overrides=overrides, use_gloo_process_groups=args.use_gloo_process_groups
    )
    config.grad_scale_func = optimizer.scale_loss
    return Learner(ddp, optimizer, get_optimizer_param_scheduler(optimizer))


def prepare_for_load(learner: Learner) -> None:
    """Give a fresh distributed optimizer state to load into; torch's Adam has none before its first step.

    The made-up step runs on zero gradients with learning rate and weight decay zero, so that no weight moves.
    """
    for optimizer in learner.sub_optimizers():
        if isinstance(optimizer, DistributedOptimizer) and not optimizer.optimizer.state:
            kept = [(group, group["lr"], group["weight_decay"]) for group in optimizer.optimizer.param_groups]
            for group, _, _ in kept:
                group["lr"] = group["weight_decay"] = 0.0
            optimizer._init_optimizer_states_with_dummy_values()
            for group, lr, weight_decay in kept:
                group["lr"], group["weight_decay"] = lr, weight_decay


def load_optimizer_state(learner: Learner, state: Any) -> None:
    """Load the optimizer part of a checkpoint.

    Megatron's distributed optimizer gives one `step` tensor to all parameters, which torch's Adam then advances once
    per parameter; each gets a tensor of its own here.
    """
    learner.optimizer.load_state_dict(state)
    optimizers = learner.sub_optimizers()
    parts = [state] if len(optimizers) == 1 else [state[index] for index in range(len(optimizers))]
    for optimizer, part in zip(optimizers, parts, strict=True):
        if not isinstance(optimizer, DistributedOptimizer):
            continue
        steps = {int(group["step"]) for group in part["optimizer"]["param_groups"] if group.get("step") is not None}
        if len(steps) != 1:
            raise RestoreError(f"the checkpoint's parameter groups are at steps {sorted(steps)}, allowed: one step.")
        (step,) = steps
        for parameter_state in optimizer.optimizer.state.values():
            parameter_state["step"] = torch.tensor(float(step))
