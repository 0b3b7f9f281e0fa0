"""Checkpoints in Megatron's `torch_dist` format, with the content that Megatron's own training writes.

Opening one runs torch's unpickler: callers check the digests of the files first.
"""

from __future__ import annotations

import argparse
import queue
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model
from megatron.training import checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from vime.backends.megatron_utils.background_save import BackgroundSave
from vime.backends.megatron_utils.optimizer import Learner, ensure_state, load_optimizer_state
from vime.backends.megatron_utils.parallel import on_all_ranks
from vime.backends.megatron_utils.weight_source import TRACKER
from vime.errors import RestoreError, TrainerError


def checkpoint_folder(directory: Path, iteration: int) -> Path:
    """Where a checkpoint of `iteration` lies: `<directory>/iter_0000123`."""
    return directory / f"iter_{iteration:07d}"


def save_checkpoint(
    learner: Learner,
    args: argparse.Namespace,
    directory: Path,
    iteration: int,
    *,
    write_tracker: bool = False,
    background: BackgroundSave | None = None,
) -> Path:
    """Write model, optimizer, schedule and random state; collective over all ranks.

    `write_tracker` also writes Megatron's file of the newest iteration, which makes the checkpoint the one that
    Megatron's own loader chooses. Returns the checkpoint's folder; otherwise as `save_into`.
    """
    folder = checkpoint_folder(directory, iteration)
    save_into(learner, args, folder, iteration, background=background)
    if write_tracker and background is not None:
        background.then(lambda: _write_tracker(directory, iteration))
    elif write_tracker and dist.get_rank() == 0:
        _write_tracker(directory, iteration)
    dist.barrier()
    return folder


def _write_tracker(directory: Path, iteration: int) -> None:
    (directory / TRACKER).write_text(str(iteration))


def save_into(
    learner: Learner,
    args: argparse.Namespace,
    folder: Path,
    iteration: int,
    *,
    background: BackgroundSave | None = None,
) -> None:
    """Write the checkpoint of `iteration` into `folder`, which may exist but must be empty; collective.

    With `background` it is only copied, as a part of that, and nothing but the folder is made yet.
    Raises `TrainerError` when it isn't empty.
    """
    filled = [dist.get_rank() == 0 and folder.exists() and any(folder.iterdir())]
    dist.broadcast_object_list(filled, src=0)
    if filled[0]:
        raise TrainerError(f"{folder} is not empty.", next_step="Remove it or save under another iteration.")
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    ensure_state(learner)
    metadata = checkpointing._build_sharded_state_dict_metadata(args)
    if any(on_all_ranks(learner.has_frozen_parameters)):
        # Layers are stored as one tensor unless they are told apart, and then no layer may lack optimizer state.
        metadata["non_homogeneous_layers"] = True
    with_optimizer = learner.keeps_state and learner.saves_state
    state = _state(learner, args, metadata, iteration=iteration, with_optimizer=with_optimizer)
    write_state(state, args, metadata, folder, background=background)
    dist.barrier()


def write_state(
    state: dict[str, Any],
    args: argparse.Namespace,
    metadata: dict[str, Any],
    folder: Path,
    *,
    background: BackgroundSave | None = None,
) -> None:
    """Write a sharded state of `metadata` into the empty `folder`, or add it to `background`; collective."""
    _use_results_queue_of_this_process()
    strategy: Any = TorchDistSaveShardedStrategy()
    if args.ckpt_fully_parallel_save and parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1:
        strategy = FullyParallelSaveStrategyWrapper(strategy, metadata["dp_cp_group"], False)
    planned = dist_checkpointing.save(
        state,
        str(folder),
        strategy,
        async_sharded_save=background is not None,
        content_metadata=checkpointing._clean_metadata_for_serialization(metadata),
        async_strategy="mcore",
    )
    if background is not None:
        background.add(planned)


def load_checkpoint(learner: Learner, args: argparse.Namespace, directory: Path, iteration: int) -> None:
    """Restore what `save_checkpoint` wrote; see `load_from`."""
    load_from(learner, args, checkpoint_folder(directory, iteration))


def load_from(learner: Learner, args: argparse.Namespace, folder: Path) -> None:
    """Restore model, optimizer, schedule and, under the same tensor and pipeline layout, random state.

    Collective over all ranks; the number of data-parallel ranks may differ from the one that saved. A learner that
    doesn't save its optimizer's state begins anew where there is none. The schedule is that of the flags, or with
    Megatron's --use-checkpoint-opt_param-scheduler the checkpoint's, at the place that the checkpoint's had reached.
    Raises `RestoreError` when the folder isn't a checkpoint of this model.
    """
    if not (folder / "metadata.json").is_file():
        raise RestoreError(f"{folder} is not a Megatron checkpoint: metadata.json is absent.")
    common = dist_checkpointing.load_common_state_dict(str(folder))
    saved_args = common["args"]
    _refuse_other_expert_layout(args, saved_args, folder)
    layout = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    saved_layout = (saved_args.tensor_model_parallel_size, saved_args.pipeline_model_parallel_size)
    ensure_state(learner)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    with_optimizer = learner.keeps_state and (learner.saves_state or _holds_optimizer(folder))
    request = _state(
        learner, args, metadata, loading=True, with_rng=layout == saved_layout, with_optimizer=with_optimizer
    )
    try:
        state = dist_checkpointing.load(request, str(folder))
    except (CheckpointingException, CheckpointException, KeyError) as error:
        raise RestoreError(
            f"{folder} can't be loaded into this model: {error}",
            next_step="Start with the model shape and optimizer flags that the checkpoint was saved with.",
        ) from error
    has_changed = _load_schedule(learner, args, state)
    for number, chunk in enumerate(learner.chunks):
        unwrap_model(chunk).load_state_dict(state["model" if len(learner.chunks) == 1 else f"model{number}"])
    if with_optimizer:
        load_optimizer_state(learner, state["optimizer"], keep_rates=has_changed)
    else:
        learner.optimizer.reload_model_params()
    learner.scheduler.step(0)  # the schedule, not the saved parameter groups, sets the learning rate
    if layout == saved_layout:
        _set_rng(state["rng_state"][0])


def _state(
    learner: Learner,
    args: argparse.Namespace,
    metadata: dict[str, Any],
    *,
    iteration: int | None = None,
    loading: bool = False,
    with_rng: bool = True,
    with_optimizer: bool,
) -> dict[str, Any]:
    rng = checkpointing.get_rng_state(
        args.ckpt_format,
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    optimizer_kwargs = {"metadata": metadata, "is_loading": loading}
    state: dict[str, Any] = checkpointing.generate_state_dict(
        args,
        [unwrap_model(chunk) for chunk in learner.chunks],
        learner.optimizer if with_optimizer else None,
        learner.scheduler,
        rng if with_rng else None,
        iteration=iteration,
        optim_sd_kwargs=optimizer_kwargs,
        model_sd_kwargs={"metadata": metadata},
    )
    return state


def _holds_optimizer(folder: Path) -> bool:
    """Whether the optimizer's state is among the tensors of a checkpoint."""
    return any("optimizer.state." in key for key in dist_checkpointing.load_tensors_metadata(str(folder)))


def _refuse_other_expert_layout(args: argparse.Namespace, saved: argparse.Namespace, folder: Path) -> None:
    """Megatron keeps an optimizer of its own for experts that are spread over ranks, in files that don't convert."""
    size, saved_size = args.expert_model_parallel_size, saved.expert_model_parallel_size
    if (size > 1) != (saved_size > 1):
        raise RestoreError(
            f"{folder}: the optimizer was saved with --expert-model-parallel-size {saved_size}, found: {size}, "
            f"allowed: {'2 or more' if saved_size > 1 else 1}.",
            next_step="Resume with an allowed size, or start anew from exported weights.",
        )


def _load_schedule(learner: Learner, args: argparse.Namespace, state: dict[str, Any]) -> bool:
    """Whether the flags' rates or their schedule are to be used in place of the checkpoint's.

    Otherwise the rates of the schedule and of parameters that had the flags' are the checkpoint's.
    """
    saved = dict(state["opt_param_scheduler"])
    saved_batch = state["args"].global_batch_size
    if saved_batch != args.global_batch_size:
        # The schedule counts rollouts; it keeps its place in optimizer steps when a step has another size.
        for name in ("num_steps", "lr_warmup_steps", "lr_decay_steps", "wd_incr_steps"):
            saved[name] = saved[name] * args.global_batch_size // saved_batch
    scheduler = learner.scheduler
    of_flags = _rates(scheduler)
    try:
        scheduler.load_state_dict(saved)
    except AssertionError:  # a value of the flags is another one
        scheduler.override_opt_param_scheduler = True
        scheduler.num_steps = 0
        scheduler.load_state_dict(saved)
    if not scheduler.override_opt_param_scheduler:
        found = _rates(scheduler)
        for group in learner.optimizer.param_groups:
            group.update({name: found[name] for name, rate in of_flags.items() if group.get(name) == rate})
    return bool(scheduler.override_opt_param_scheduler)


def _rates(scheduler: Any) -> dict[str, float]:
    """By their names in parameter groups, whose own count for their parameters."""
    return {name: getattr(scheduler, name) for name in ("max_lr", "min_lr", "start_wd", "end_wd")}


def _set_rng(saved: dict[str, Any]) -> None:
    random.setstate(saved["random_rng_state"])
    np.random.set_state(saved["np_rng_state"])
    torch.set_rng_state(saved["torch_rng_state"])
    torch.cuda.set_rng_state(saved["cuda_rng_state"])
    get_cuda_rng_tracker().set_states(saved["rng_tracker_states"])


def _use_results_queue_of_this_process() -> None:
    """Let the next writer hand its results over through an ordinary queue of its own.

    Megatron's default is a queue of a spawned manager process, which re-imports the main script: seconds per process,
    and a failure where that script has no main guard. It is only needed when another process writes; ours is saved by
    threads of this one.
    """
    filesystem_async._results_queue = queue.Queue()
