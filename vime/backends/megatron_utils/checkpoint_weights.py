"""The weights of a model alone, without optimizer, schedule and random state."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.utils import unwrap_model
from megatron.training import checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from vime.backends.megatron_utils import hf_weights
from vime.backends.megatron_utils.background_save import BackgroundSave
from vime.backends.megatron_utils.checkpoint import write_state
from vime.backends.megatron_utils.open_weights import open_weights
from vime.backends.megatron_utils.weight_source import WeightSource
from vime.errors import RestoreError


def load_source(chunks: Sequence[torch.nn.Module], hf_config: Mapping[str, Any], source: WeightSource) -> None:
    """Fill the model from a Hugging Face folder or a Megatron checkpoint of either format, saved under any layout.

    The optimizer isn't told. Raises `ModelError` or `RestoreError` when the weights aren't there or don't fit, and
    `SettingsError` for an iteration of a Hugging Face folder.
    """
    with open_weights(source, hf_config) as reader:
        hf_weights.load_weights(chunks, reader, hf_config)


def load_weights(chunks: Sequence[torch.nn.Module], folder: Path) -> None:
    """Fill the model from a checkpoint in Megatron's `torch_dist` format, saved under any parallel layout.

    Collective over all ranks. Raises `RestoreError` when the folder isn't a checkpoint of this model.
    """
    if not (folder / "metadata.json").is_file():
        raise RestoreError(f"{folder} is not a Megatron checkpoint in torch_dist format: metadata.json is absent.")
    metadata = dist_checkpointing.load_content_metadata(str(folder)) or {}
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    try:
        state = dist_checkpointing.load(_model_state(chunks, metadata), str(folder))
    except (CheckpointingException, CheckpointException, KeyError) as error:
        raise RestoreError(
            f"{folder} can't be loaded into this model: {error}", next_step="Give a checkpoint of the same model shape."
        ) from error
    for name, chunk in _named(chunks).items():
        unwrap_model(chunk).load_state_dict(state[name])


def save_weights(
    chunks: Sequence[torch.nn.Module],
    args: argparse.Namespace,
    folder: Path,
    *,
    background: BackgroundSave | None = None,
) -> None:
    """Write a checkpoint that `load_weights` reads into a new folder, or add it to `background`; collective."""
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    metadata = checkpointing._build_sharded_state_dict_metadata(args)
    write_state(_model_state(chunks, metadata), args, metadata, folder, background=background)


def _model_state(chunks: Sequence[torch.nn.Module], metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: unwrap_model(chunk).sharded_state_dict(metadata=metadata) for name, chunk in _named(chunks).items()}


def _named(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Chunks by the names that Megatron gives them in a checkpoint."""
    return {"model" if len(chunks) == 1 else f"model{number}": chunk for number, chunk in enumerate(chunks)}
