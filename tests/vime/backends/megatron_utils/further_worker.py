"""One rank of a world that trains layers for further tokens; see `megatron_worker`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.tiny_families import build_further_model
from tests.vime.backends.megatron_utils.dense_reference import step_reference
from tests.vime.backends.megatron_utils.further_reference import FurtherReference
from tests.vime.backends.megatron_utils.megatron_worker import (
    ONE_RANK,
    TWO_RANKS,
    Weights,
    World,
    largest_difference,
    main,
    metric_difference,
    train,
    weights_of,
)
from tests.vime.backends.megatron_utils.tiny_batches import make_sequences
from vime.algorithms.objective_config import ObjectiveConfig
from vime.algorithms.policy_loss import PolicyLossSettings
from vime.backends.megatron_utils.trainer import MegatronTrainer
from vime.backends.megatron_utils.weight_source import WeightSource

DESCENT = ("--optimizer", "sgd", "--sgd-momentum", "0")
SCALE = 0.3
POLICY = ObjectiveConfig(policy=PolicyLossSettings(eps_clip=0.1, eps_clip_high=0.25, eps_clip_c=1.5))


def checkpoint(world: World) -> Path:
    path = world.folder / f"further_{world.rank}"
    return path if path.exists() else build_further_model(path)


def all_weights(trainer: MegatronTrainer, folder: Path) -> Weights:
    """With the layers for further tokens, which only files have."""
    trainer.save_hf(folder)
    return load_file(folder / "model.safetensors")


def against_the_reference(world: World) -> dict[str, Any]:
    folder, sequences = checkpoint(world), make_sequences(1)
    options: dict[str, Any] = {
        **{"hf_checkpoint": folder, "objective": POLICY, "num_further": 1, "further_scale": SCALE},
        **{"lr": 1.0, "clip_grad": 0.0, "log_probs_chunk_size": 7, "temperature": 0.7},
    }
    with world.trainer(*DESCENT, **options) as trainer:
        before = all_weights(trainer, world.folder / "before")
        published = list(weights_of(trainer))
        metrics = train(trainer, [1], ONE_RANK)[0]
        after = all_weights(trainer, world.folder / "after")
    with world.trainer(*DESCENT, "--mtp-detach-heads", **options) as trainer:
        train(trainer, [1], ONE_RANK)
        detached = all_weights(trainer, world.folder / "detached")
    reference = FurtherReference(folder)
    expected = step_reference(reference, sequences, temperature=0.7, eps=(0.1, 0.25, 1.5), per_token=False)
    policy = {name: gradient.clone() for name, gradient in reference.gradients().items()}
    further = reference.loss(sequences)
    (SCALE * further).backward()
    gradients = reference.gradients()
    moved = {name: before[name].double() - after[name].double() for name in gradients}
    original = load_file(folder / "model.safetensors")
    of_the_layer = {name for name in gradients if name.startswith(reference.layer)}
    return {
        "metrics": max(abs(metrics[name] - value) for name, value in expected.items()),
        "mtp_loss": abs(metrics["mtp_loss"] - float(further)),
        "gradients": max(float((moved[name] - gradients[name]).abs().max()) for name in moved),
        "detached": max(
            float((before[name].double() - detached[name].double() - alone).abs().max())
            for name, alone in ((name, gradients[name] if name in of_the_layer else policy[name]) for name in moved)
        ),
        "reaches_the_model": max(float((gradients[name] - policy[name]).abs().max()) for name in policy),
        "smallest_of_the_layer": min(float(gradients[name].abs().max()) for name in of_the_layer),
        "num_of_the_layer": len(of_the_layer),
        "published": any(name.startswith(reference.layer) for name in published),
        "bit_equal": before.keys() == original.keys()
        and all(torch.equal(before[name], original[name]) for name in original),
        "copies": torch.equal(after[f"{reference.layer}embed_tokens.weight"], after["model.embed_tokens.weight"])
        and torch.equal(after[f"{reference.layer}shared_head.head.weight"], after["lm_head.weight"]),
    }


def saved_and_loaded(world: World) -> dict[str, float]:
    """A checkpoint of Megatron's, resumed from and read as weights alone."""
    options = {"hf_checkpoint": checkpoint(world), "num_further": 1}
    with world.trainer(**options) as trainer:
        train(trainer, [1], ONE_RANK)
        folder = trainer.save(world.folder / "saved", 1)
        weights = all_weights(trainer, world.folder / "one")
    with world.trainer(load=False, **options) as trainer:
        trainer.load(world.folder / "saved", 1)
        resumed = all_weights(trainer, world.folder / "two")
        trainer.load_hf()
        trainer.load_weights(WeightSource("--load", folder))
        read = all_weights(trainer, world.folder / "three")
    return {"resumed": largest_difference(weights, resumed), "read": largest_difference(weights, read)}


TENSOR = ("--tensor-model-parallel-size", "2")
SPLITS: dict[str, tuple[str, ...]] = {
    "tensor": TENSOR,
    "pipeline": ("--pipeline-model-parallel-size", "2"),
    "experts": ("--expert-model-parallel-size", "2"),
    "zigzag": ("--context-parallel-size", "2"),
    "recompute": (
        *TENSOR,
        *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
}


def train_split(world: World, name: str, argv: tuple[str, ...]) -> dict[str, float]:
    """Two steps on two ranks and on one."""
    even = ("--decoder-last-pipeline-num-layers", "1") if name == "pipeline" else ()
    options: dict[str, Any] = {"hf_checkpoint": checkpoint(world), "lr": 0.1, "num_further": 1}
    with world.trainer(*DESCENT, *argv, *even, **options) as trainer:
        split = TWO_RANKS if trainer.data_parallel_size == 2 else ONE_RANK
        metrics = train(trainer, range(2), split)
        trainer.save_hf(world.folder / f"{name}_two")
    if world.rank != 0:
        world.started += 1
        return {}
    with world.trainer(*DESCENT, size=1, **options) as trainer:
        alone_metrics = train(trainer, range(2), ONE_RANK)
        alone_weights = all_weights(trainer, world.folder / f"{name}_one")
    weights = load_file(world.folder / f"{name}_two" / "model.safetensors")
    return {
        "weights": largest_difference(weights, alone_weights),
        "metrics": metric_difference(metrics, alone_metrics),
    }


if __name__ == "__main__":
    splits = {name: functools.partial(train_split, name=name, argv=argv) for name, argv in SPLITS.items()}
    main({"reference": against_the_reference, "saved": saved_and_loaded, **splits})
