"""Process groups, random state and Megatron's globals of one rank."""

from __future__ import annotations

import argparse
import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training import global_vars

from vime.errors import TrainerError


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
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        create_gloo_process_groups=args.use_gloo_process_groups,
    )
    global_vars.set_args(args)


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


def is_metric_source() -> bool:
    """Whether this rank is the one of its data-parallel replica that counts for sums over all ranks."""
    return bool(
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )
