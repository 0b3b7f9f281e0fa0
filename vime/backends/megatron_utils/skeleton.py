"""A whole Megatron model on one rank, without memory for its weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vime.backends.megatron_utils.arguments import parse_megatron_args
from vime.backends.megatron_utils.config import TrainerConfig
from vime.backends.megatron_utils.shim import prepare_megatron
from vime.models.weight_names import WeightRule, weight_rules
from vime.outputs import passing_folder

prepare_megatron()

from megatron.training import checkpointing  # noqa: E402
from megatron.training.argument_utils import core_transformer_config_from_args  # noqa: E402

from vime.backends.megatron_utils.model import build_model  # noqa: E402
from vime.backends.megatron_utils.parallel import seed_everything, start_parallel, stop_parallel  # noqa: E402


@dataclass(frozen=True)
class Skeleton:
    """A model on the meta device, Megatron's arguments for it, and what its weights are called."""

    args: argparse.Namespace
    model: Any
    rules: list[WeightRule]
    shapes: dict[str, tuple[int, ...]]
    """Shape of each full parameter and saved buffer by its Megatron name; the vocabulary is not padded."""

    def shape(self, rule: WeightRule) -> tuple[int, ...]:
        return self.shapes[rule.megatron_name]

    def content_metadata(self) -> dict[str, Any]:
        """How Megatron's own training lays a checkpoint out."""
        metadata: dict[str, Any] = checkpointing._build_sharded_state_dict_metadata(self.args)
        return metadata


@contextmanager
def open_skeleton(
    hf_checkpoint: Path, hf_config: Mapping[str, Any], num_further: int = 0, *, timeout_s: float = 60.0
) -> Iterator[Skeleton]:
    """Build the model, with `num_further` layers for further tokens.

    The process must not hold a trainer, and must not see a GPU.

    Raises `ModelError` for a model that can't be built, and `StorageError` where no temporary folder can be made.
    """
    argv = ("--no-initialization", "--no-save-optim")
    config = TrainerConfig(hf_checkpoint=hf_checkpoint, megatron_argv=argv, num_further=num_further)
    args = parse_megatron_args(config.megatron_argv, hf_config, config)
    with passing_folder("vime-skeleton-") as folder:
        start_parallel(args, f"file://{folder}/store", timeout_s)
        try:
            seed_everything(args)
            with torch.device("meta"):
                (model,) = build_model(args, core_transformer_config_from_args(args))
            state = model.state_dict(keep_vars=True)
            shapes = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}
            yield Skeleton(args, model.eval(), weight_rules(hf_config, num_further), shapes)
        finally:
            stop_parallel()
