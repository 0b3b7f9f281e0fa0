"""Process groups, random state and Megatron's globals of one rank."""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training import global_vars

from vime.algorithms.ragged import Reduce, on_one_rank
from vime.backends.megatron_utils.context import ContextLayout, ContextShare
from vime.errors import SettingsError, TrainerError

CONTEXT_LAYOUTS = {"p2p": ContextLayout.ZIGZAG, "allgather": ContextLayout.CONTIGUOUS}
"""By value of Megatron's --cp-comm-type. Keys and values are gathered under either of them."""


def start_parallel(args: argparse.Namespace, init_method: str, timeout_s: float) -> None:
    """Join the other ranks and build Megatron's groups; raises `TrainerError` when the ranks don't meet in time."""
    if torch.cuda.is_available():
        torch.cuda.set_device(0 if torch.cuda.device_count() == 1 else args.rank % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(
            backend,
            init_method=init_method,
            rank=args.rank,
            world_size=args.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise TrainerError(
            f"rank {args.rank} of {args.world_size} could not join at {init_method}: {error}",
            next_step="Check that every rank got the same address and that it is reachable.",
        ) from error
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        create_gloo_process_groups=args.use_gloo_process_groups,
    )
    global_vars.set_args(args)


@contextlib.contextmanager
def current_args(args: argparse.Namespace) -> Iterator[None]:
    """Let Megatron's global arguments be `args` inside, and what they were afterwards."""
    before = global_vars.get_args()
    global_vars.set_args(args)
    try:
        yield
    finally:
        global_vars.set_args(before)


def use_threads(num_threads: int | None) -> None:
    """Let torch's operations use so many threads; a setting of the calling thread. None leaves torch's choice."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def seed_everything(args: argparse.Namespace) -> None:
    """Seed Python, numpy, torch and Megatron's tracker the way Megatron does: pipeline stages differ."""
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def stop_parallel() -> None:
    """Leave all groups and forget Megatron's globals, so that the process can start another trainer."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    global_vars.destroy_global_vars()


def on_all_ranks(value: Any) -> list[Any]:
    """The value of each rank, on every rank; collective."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def is_metric_source() -> bool:
    """Whether this rank counts in sums over all ranks: one for each set of tokens that a loss was computed on."""
    return bool(parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0)


def is_sample_source() -> bool:
    """Whether this rank speaks for the samples of its data-parallel share: one of the ranks that share them."""
    return is_metric_source() and parallel_state.get_context_parallel_rank() == 0


def context_share(args: argparse.Namespace) -> ContextShare:
    """This rank's place in its context-parallel group; raises `SettingsError` for a --cp-comm-type without layout."""
    names = args.cp_comm_type if isinstance(args.cp_comm_type, list) else [args.cp_comm_type]
    if args.context_parallel_size > 1 and (len(set(names)) != 1 or names[0] not in CONTEXT_LAYOUTS):
        raise SettingsError(
            f"--cp-comm-type is {' '.join(map(str, names))}, allowed: one of {', '.join(CONTEXT_LAYOUTS)}.",
            next_step="p2p cuts each sequence in zigzag, allgather the whole pack in consecutive parts.",
        )
    layout = CONTEXT_LAYOUTS.get(names[0], ContextLayout.ZIGZAG)
    return ContextShare(parallel_state.get_context_parallel_rank(), args.context_parallel_size, layout)


def sum_over_context() -> Reduce:
    """Sum over the ranks that hold parts of the same sequences, differentiable."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return on_one_rank

    apply: Callable[..., torch.Tensor] = _SumOverGroup.apply

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        return apply(tensor, group)

    return reduce


class _SumOverGroup(torch.autograd.Function):
    """Every rank's loss depends on the sum, so each rank's gradient is the sum of those of all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
