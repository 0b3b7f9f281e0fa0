"""One rank of a world that compares every family of models with Hugging Face; see `megatron_worker`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from tests.support.tiny_families import FAMILIES, build_tiny_model
from tests.vime.backends.megatron_utils.megatron_worker import (
    ONE_RANK,
    RECOMPUTE,
    TWO_RANKS,
    World,
    alone,
    largest_difference,
    main,
    metric_difference,
    train,
    weights_of,
)
from tests.vime.backends.megatron_utils.tiny_batches import make_sequences, pack
from vime.backends.megatron_utils.model import training_device
from vime.backends.megatron_utils.packing import to_tensors
from vime.backends.megatron_utils.trainer import MegatronTrainer


def checkpoint(world: World, name: str, **overrides: Any) -> Path:
    path = world.folder / f"family_{name}_{world.rank}"
    return path if path.exists() else build_tiny_model(path, name, seed=3, **overrides)


def logits_of(trainer: MegatronTrainer, members: Any, sequences: Any) -> torch.Tensor:
    tensors = to_tensors(pack(sequences, members), training_device())
    chunk = trainer._learner.chunks[0]
    logits = chunk(tensors.tokens, tensors.position_ids, None, packed_seq_params=tensors.packed)
    return logits[0].cpu()


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def families(world: World) -> dict[str, dict[str, Any]]:
    """Logits against transformers in float64, and the weights' way into Megatron and back."""
    from tests.vime.backends.megatron_utils.dense_reference import dense_logits, load_double

    found = {}
    sequences = make_sequences(0)
    for name in FAMILIES:
        folder = checkpoint(world, name)
        with world.trainer(hf_checkpoint=folder) as trainer, torch.no_grad():
            packed = logits_of(trainer, range(8), sequences)
            alone = torch.cat([logits_of(trainer, [member], sequences) for member in range(8)])
            first = {key: tensor.to("cpu", copy=True) for key, tensor in trainer.named_hf_weights()}
            trainer.save_hf(world.folder / f"back_{name}")
        model = load_double(folder)
        with torch.no_grad():
            expected = torch.cat([dense_logits(model, item.tokens) for item in sequences])
        original, saved = tensors_of(folder), tensors_of(world.folder / f"back_{name}")
        found[name] = {
            "relative": float((packed - expected).abs().max() / expected.abs().max()),
            "packed_to_alone": float((packed - alone).abs().max()),
            "spread": float(expected.std()),
            "bit_equal": all(same(original, other) for other in (first, saved)),
        }
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and np.array_equal(one[name].numpy(), other[name].numpy()) for name in one
    )


TENSOR = ("--tensor-model-parallel-size", "2")
SPLITS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bias_tensor": ("qwen2", TENSOR),
    "fused_tensor": ("glm", TENSOR),
    "latent_tensor": ("deepseek_v3_yarn", TENSOR),
    "latent_pipeline": ("deepseek_v3", ("--pipeline-model-parallel-size", "2")),
    "latent_experts": ("deepseek_v3", ("--expert-model-parallel-size", "2")),
    "latent_zigzag": ("deepseek_v3_yarn", ("--context-parallel-size", "2")),
    "latent_contiguous": ("deepseek_v3", ("--context-parallel-size", "2", "--cp-comm-type", "allgather")),
    "latent_recompute": ("deepseek_v3", (*TENSOR, *RECOMPUTE)),
}
DESCENT = ("--optimizer", "sgd", "--sgd-momentum", "0")


def train_split(world: World, name: str, argv: tuple[str, ...]) -> dict[str, Any]:
    """Two steps on two ranks and on one."""
    options: dict[str, Any] = {"hf_checkpoint": checkpoint(world, name, num_hidden_layers=4), "lr": 0.1}
    with world.trainer(*DESCENT, *argv, **options) as trainer:
        split = TWO_RANKS if trainer.data_parallel_size == 2 else ONE_RANK
        metrics, weights = train(trainer, range(2), split), weights_of(trainer)
    alone_metrics, alone_weights = alone(world, range(2), *DESCENT, **options)
    if world.rank != 0:
        return {}
    return {
        "weights": largest_difference(weights, alone_weights),
        "metrics": metric_difference(metrics, alone_metrics),
        "moved": {
            key: float((weights[key] - first).abs().max())
            for key, first in tensors_of(options["hf_checkpoint"]).items()
        },
    }


if __name__ == "__main__":
    splits = {name: functools.partial(train_split, name=family, argv=argv) for name, (family, argv) in SPLITS.items()}
    main({"families": families, **splits})
