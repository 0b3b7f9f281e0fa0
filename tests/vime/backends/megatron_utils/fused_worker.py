"""One rank that trains with fused kernels and without, in float32; see `megatron_worker`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.support.tiny_families import build_tiny_model
from tests.vime.backends.megatron_utils.megatron_worker import (
    ONE_RANK,
    RECOMPUTE,
    World,
    largest_difference,
    main,
    metric_difference,
    train,
    weights_of,
)
from vime.backends.megatron_utils import gated_mlp, model, self_attention
from vime.backends.megatron_utils.fused import gate, heads
from vime.backends.megatron_utils.head import backward, forward, projection, softmax
from vime.backends.megatron_utils.shim import norm_of_all, scale_all

FAMILIES = {"qwen3": RECOMPUTE, "glm_plain": (), "deepseek_v3": (), "llama_tied": ("--no-rope-freq", "2")}
"""Megatron's flags by name."""


@contextlib.contextmanager
def all_fused(*, fused: bool) -> Iterator[dict[str, mock.Mock]]:
    """With the choice made for all tensors; how often each kernel is called."""
    with contextlib.ExitStack() as stack:
        for module in (gated_mlp, self_attention):
            stack.enter_context(mock.patch.object(module, "runs_fused", return_value=fused))
        for module in (model, backward, forward, projection, softmax):
            stack.enter_context(mock.patch.object(module, "has_kernels", return_value=fused))
        if fused:
            for name, function in (("l2_norm_impl", norm_of_all), ("multi_tensor_scale_impl", scale_all)):
                stack.enter_context(mock.patch(f"megatron.core.optimizer.clip_grads.{name}", function))
        yield {
            name: stack.enter_context(mock.patch.object(module, name, wraps=getattr(module, name)))
            for module, name in ((gate, "swiglu"), (heads, "rotated_heads"))
        }


def fused_step(world: World) -> dict[str, dict[str, Any]]:
    """An optimizer step of each family."""
    found = {}
    for name, argv in FAMILIES.items():
        folder = build_tiny_model(world.folder / name, name, seed=3)
        results = []
        for fused in (False, True):
            with all_fused(fused=fused) as kernels, world.trainer(*argv, hf_checkpoint=folder, lr=1e-4) as trainer:
                results.append((train(trainer, [0], ONE_RANK), weights_of(trainer)))
        (plain_metrics, plain_weights), (metrics, weights) = results
        found[name] = {
            "metrics": metric_difference(metrics, plain_metrics),
            "weights": largest_difference(weights, plain_weights),
            "kernels": sorted(kernel for kernel, calls in kernels.items() if calls.called),
        }
    return found


if __name__ == "__main__":
    main(globals())
