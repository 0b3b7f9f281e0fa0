"""Megatron's gradient buffers, optimizer and learning-rate schedule, built by Megatron's own builders."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from megatron.training.training import (
    get_megatron_ddp_config,
    get_megatron_optimizer_config,
    get_optimizer_param_scheduler,
)

from vime.backends.megatron_utils.arguments import refusal_words
from vime.backends.megatron_utils.stateless_adam import StatelessAdam
from vime.errors import RestoreError, SettingsError

_SCHEDULE = (
    "lr",
    "min_lr",
    "lr_warmup_init",
    "lr_warmup_iters",
    "lr_warmup_fraction",
    "lr_decay_style",
    "lr_decay_iters",
    "start_weight_decay",
    "end_weight_decay",
)


@dataclass(frozen=True)
class Learner:
    """A model that can take optimizer steps."""

    chunks: list[Any]
    """`DistributedDataParallel` around each virtual pipeline stage of this rank; one without them."""
    optimizer: Any
    scheduler: OptimizerParamScheduler
    saves_state: bool = True
    """Whether checkpoints are to hold the optimizer's state."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(get_canonical_lr_for_logging(self.optimizer.param_groups) or 0.0)

    def sub_optimizers(self) -> list[Any]:
        """The optimizers behind Megatron's chain."""
        return list(self.optimizer.chained_optimizers)

    @property
    def has_frozen_parameters(self) -> bool:
        return any(not parameter.requires_grad for chunk in self.chunks for parameter in chunk.parameters())

    @property
    def keeps_state(self) -> bool:
        """Whether there is anything of the optimizer to save; not with StatelessAdam and where nothing is trained."""
        kinds = [type(part.optimizer) for part in self.sub_optimizers() if not part.is_stub_optimizer]
        return bool(kinds) and StatelessAdam not in kinds


def build_learner(
    model: Sequence[torch.nn.Module],
    args: argparse.Namespace,
    config: TransformerConfig,
    *,
    stateless_adam: bool = False,
    saves_state: bool = True,
) -> Learner:
    """Wrap the chunks of a model for data parallelism; give them an optimizer and a schedule that counts rollouts.

    `stateless_adam` puts an Adam without moments in the place of Adam. Raises `SettingsError` for a schedule that
    Megatron refuses.
    """
    chunks = [
        DistributedDataParallel(config, get_megatron_ddp_config(args), chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(model)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    no_sync = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    optimizer_config, overrides = get_megatron_optimizer_config(args)
    optimizer = get_megatron_optimizer(
        optimizer_config, chunks, config_overrides=overrides, use_gloo_process_groups=args.use_gloo_process_groups
    )
    if stateless_adam:
        for part in optimizer.chained_optimizers:
            if not part.is_stub_optimizer:
                decoupled = optimizer_config.decoupled_weight_decay
                part.optimizer = StatelessAdam(part.optimizer.param_groups, decoupled=decoupled)
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            take_steps_at_once(part.optimizer)
    config.grad_scale_func = optimizer.scale_loss
    return Learner(chunks, optimizer, _schedule(args, optimizer), saves_state)


def _schedule(args: argparse.Namespace, optimizer: Any) -> OptimizerParamScheduler:
    """Megatron's own, which asserts that its limits hold."""
    try:
        return get_optimizer_param_scheduler(optimizer)
    except AssertionError as error:
        given = [f"--{name.replace('_', '-')} {vars(args)[name]}" for name in _SCHEDULE if vars(args)[name] is not None]
        raise SettingsError(
            f"Megatron refuses the schedule of the rates: {refusal_words(error)}. It is {', '.join(given)}.",
            next_step="Correct these flags.",
        ) from error


def take_steps_at_once(inner: Any) -> None:
    """Let torch's Adam take one pass over memory where all is on GPUs; its counts of steps are on the GPU then.

    Settings that came with a state give way to what fits this run's devices.
    """
    if not isinstance(inner, torch.optim.Adam):
        return
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    fused = bool(parameters) and all(parameter.is_cuda for parameter in parameters)
    for group in inner.param_groups:
        group["fused"] = True if fused else None
    for parameter, state in inner.state.items():
        if "step" in state:
            state["step"] = _step_count(parameter, float(state["step"]), fused=fused)


def _step_count(parameter: torch.Tensor, steps: float, *, fused: bool | None) -> torch.Tensor:
    """A tensor of its own: Adam advances it in place for each parameter."""
    return torch.tensor(steps, device=parameter.device if fused else "cpu")


def ensure_state(learner: Learner) -> None:
    """Give torch's Adam the state that it has before its first step, where it has none yet.

    torch makes it lazily, but a checkpoint of an untrained model has to hold it, and Megatron loads into it in place.
    """
    for optimizer in learner.sub_optimizers():
        inner = optimizer.optimizer
        if not isinstance(inner, torch.optim.Adam):
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state[parameter]
                if not state:
                    state["step"] = _step_count(parameter, 0.0, fused=group["fused"])
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def clear_state(learner: Learner) -> None:
    """Let the optimizer be as before its first step: no moments, and steps counted from 0 for their correction."""
    for optimizer in learner.sub_optimizers():
        if optimizer.is_stub_optimizer:
            continue
        for state in optimizer.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        for group in optimizer.optimizer.param_groups:
            if "step" in group:  # where all parameters share one
                group["step"] = 0


def load_optimizer_state(learner: Learner, state: Any, *, keep_rates: bool) -> None:
    """Load the optimizer part of a checkpoint; raises `RestoreError` when its parameter groups don't fit.

    `keep_rates` keeps this run's learning rates and weight decay in place of the saved ones: Megatron identifies the
    parameter groups by them, so that a checkpoint saved with other rates would not be recognised.
    Two things that Megatron does to torch's Adam are put right: a common `step` of zero isn't stored, and the
    distributed optimizer gives one `step` tensor to all parameters, which Adam then advances once per parameter.
    """
    optimizers = learner.sub_optimizers()
    parts = [state] if len(optimizers) == 1 else [state[index] for index in range(len(optimizers))]
    pairs = [pair for pair in zip(optimizers, parts, strict=True) if isinstance(pair[0].optimizer, torch.optim.Adam)]
    for optimizer, part in pairs:
        if not isinstance(optimizer, DistributedOptimizer):
            part.get("optimizer", part)["state"].setdefault("common_step", torch.tensor(0.0))
        if keep_rates:
            _use_current_rates(part.get("optimizer", part)["param_groups"], optimizer.param_groups)
    try:
        learner.optimizer.load_state_dict(state)
    except ValueError as error:
        raise RestoreError(
            f"the checkpoint's optimizer doesn't fit: {str(error).splitlines()[0]}",
            next_step="Use the optimizer flags that the checkpoint was saved with.",
        ) from error
    for optimizer, part in pairs:
        if not isinstance(optimizer, DistributedOptimizer):
            take_steps_at_once(optimizer.optimizer)
            continue
        steps = {int(group["step"]) for group in part["optimizer"]["param_groups"] if group.get("step") is not None}
        if len(steps) != 1:
            raise RestoreError(f"the checkpoint's parameter groups are at steps {sorted(steps)}, allowed: one step.")
        (step,) = steps
        for parameter_state in optimizer.optimizer.state.values():
            parameter_state["step"] = torch.tensor(float(step))
        take_steps_at_once(optimizer.optimizer)


def _use_current_rates(saved: list[dict[str, Any]], current: list[dict[str, Any]]) -> None:
    rates = ("max_lr", "min_lr", "start_wd", "end_wd")
    kind = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
    by_kind = {tuple(group.get(name) for name in kind): group for group in current}
    for group in saved:
        match = by_kind.get(tuple(group.get(name) for name in kind), {})
        group.update({name: match[name] for name in rates if name in match})


def learner_tensors(learner: Learner) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(weights, saved buffers and optimizer state; gradient buffers) of this rank, in any order, views included."""
    kept: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for chunk in learner.chunks:
        core = unwrap_model(chunk)
        kept += [*core.parameters(), *core.buffers()]
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            gradients.append(buffer.grad_data)
            if buffer.param_data is not None:
                kept.append(buffer.param_data)
    for optimizer in learner.sub_optimizers():
        if optimizer.is_stub_optimizer:
            continue
        kept += [parameter for group in optimizer.optimizer.param_groups for parameter in group["params"]]
        states = optimizer.optimizer.state.values()
        kept += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return kept, gradients
