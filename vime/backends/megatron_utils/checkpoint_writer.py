"""Writing a whole model as a Megatron checkpoint, one parameter after the other."""

from __future__ import annotations

import argparse
import dataclasses
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.training import checkpointing

from vime.backends.megatron_utils.skeleton import Skeleton
from vime.backends.megatron_utils.torch_dist_files import TorchDistWriter
from vime.backends.megatron_utils.torch_files import RankFile, write_frame
from vime.backends.megatron_utils.weight_source import MODEL_FILE
from vime.models.weight_names import WeightRule

_VERSION = 3.0
"""Megatron's number for the layout of its attention weights."""


def write_torch_dist(
    folder: Path, skeleton: Skeleton, weights: Iterable[tuple[WeightRule, torch.Tensor]], iteration: int
) -> None:
    """Write the `torch_dist` format into an empty folder, with keys and shapes as Megatron's own training writes."""
    writer = TorchDistWriter(folder)
    metadata = skeleton.content_metadata()
    layout = skeleton.model.sharded_state_dict(metadata=metadata)
    for rule, full in weights:
        for part in _parts(layout[rule.megatron_name], full):
            stored = part.data.reshape((1,) * part.prepend_axis_num + part.local_shape)
            writer.add_part(part.key, part.global_shape, part.global_offset, stored)
    for entry in layout.values():
        if isinstance(entry, ShardedObject):
            writer.add_object(entry.unique_key, _saved([entry.data]))
    common = {
        **_common_state(skeleton.args, iteration),
        "content_metadata": checkpointing._clean_metadata_for_serialization(metadata),
    }
    writer.add_object(ShardedObject("common_state", None, (1,), (0,)).unique_key, _saved([common]))
    writer.finish()


def write_torch(
    folder: Path,
    skeleton: Skeleton,
    weights: Iterable[tuple[WeightRule, torch.Tensor]],
    dtypes: dict[str, torch.dtype],
    iteration: int,
) -> None:
    """Write the `torch` format for one rank into an empty folder; `dtypes` are those of the weights, by name."""
    state = skeleton.model.state_dict_for_save_checkpoint()
    tensors = {name: (skeleton.shapes[name], dtype) for name, dtype in dtypes.items()}
    rest = {name: value for name, value in state.items() if name not in tensors}
    path = folder / "mp_rank_00" / MODEL_FILE
    write_frame(path, {**_common_state(skeleton.args, iteration), "model": rest}, tensors)
    with RankFile(path, writable=True) as file:
        for rule, full in weights:
            file.write(file.state["model"][rule.megatron_name], full)


def _common_state(args: argparse.Namespace, iteration: int) -> dict[str, Any]:
    return {"args": args, "checkpoint_version": _VERSION, "iteration": iteration}


def _parts(entry: ShardedTensor | ShardedTensorFactory, full: torch.Tensor) -> Iterator[ShardedTensor]:
    """The tensors that a parameter is stored as: gate and up rows are two."""
    if isinstance(entry, ShardedTensorFactory):
        yield from dataclasses.replace(entry, data=full).build()
    else:
        yield dataclasses.replace(entry, data=full, dtype=full.dtype)


def _saved(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()
