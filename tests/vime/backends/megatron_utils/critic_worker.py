"""One rank of a world with an actor and a critic; see `megatron_worker`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.utils import unwrap_model

from tests.reference.dense_advantages import gae
from tests.reference.dense_value import ValueSequence, value_step
from tests.support.tiny_models import build_tiny_qwen3
from tests.support.watched_batches import WatchedBatches
from tests.vime.backends.megatron_utils.megatron_worker import (
    MODELS,
    ONE_RANK,
    Weights,
    World,
    largest_difference,
    main,
    metric_difference,
    weights_of,
)
from tests.vime.backends.megatron_utils.tiny_batches import Sequence_, make_sequences, pack, totals
from vime.algorithms.objective_config import Estimator, ObjectiveConfig
from vime.backends.megatron_utils import hf_weights
from vime.backends.megatron_utils.config import CriticConfig, TrainerConfig
from vime.backends.megatron_utils.critic import Critic
from vime.backends.megatron_utils.device_turns import DeviceTurns
from vime.backends.megatron_utils.trained_model import TrainedModel
from vime.backends.megatron_utils.trainer import MegatronTrainer
from vime.data.batch import PackedMicrobatch, RouteRows
from vime.errors import VimeError

PPO = ObjectiveConfig(estimator=Estimator.PPO, gamma=0.9, lambd=0.8, use_rollout_logprobs=False)
SHARES = {1: ONE_RANK, 2: [[[0, 1, 2], [4]], [[3, 5], [6, 7]]]}
DESCENT = ("--optimizer", "sgd", "--sgd-momentum", "0")


@dataclass(frozen=True)
class Pair:
    """Actor and critic of one rank."""

    actor: MegatronTrainer
    critic: Critic


@contextmanager
def pair(
    world: World,
    *argv: str,
    size: int | None = None,
    load: bool = True,
    model: str = "tied",
    critic: dict[str, Any] | None = None,
    share: bool = False,
    **options: Any,
) -> Iterator[Pair]:
    options = {"objective": PPO, "lr": 5e-3, "num_threads": 1, "timeout_s": 60.0, "megatron_argv": argv, **options}
    options.setdefault("hf_checkpoint", world.checkpoint(model, seed=3, **MODELS[model]))
    config = TrainerConfig(**options)
    world.started += 1
    store = f"file://{world.folder}/critic_store{world.started}"
    with MegatronTrainer(config, world.rank, size or world.size, store) as trainer:
        own = CriticConfig(**{"trainer": config, "value_clip": 0.2, **(critic or {})})
        turns = trainer.turns if share else DeviceTurns()
        values = Critic(own, world.rank, size or world.size, turns)
        if load:
            trainer.load_hf()
            values.start()
            set_head(values, seed=5)
        yield Pair(trainer, values)


def head_of(critic: Critic) -> dict[str, torch.nn.Parameter]:
    """Parameters of the value head, on the last pipeline stage."""
    critic._model.take_turn()
    last = unwrap_model(critic._model.learner.chunks[-1])
    return dict(last.output_layer.named_parameters()) if last.post_process else {}


def set_head(critic: Critic, seed: int) -> None:
    """A head that tells states apart."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head_of(critic).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    critic._model.learner.optimizer.reload_model_params()


def critic_weights(critic: Critic) -> Weights:
    """Backbone by its Hugging Face names (on rank 0), and the head."""
    critic._model.take_turn()
    named = hf_weights.iterate_hf_weights(critic._model.learner.chunks, critic._hf_config)
    found = {}
    for name, tensor in named:
        found[name] = tensor.to("cpu", copy=True)
    head = {f"head.{name}": parameter.detach().cpu().clone() for name, parameter in head_of(critic).items()}
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, head)
    for each in gathered:
        found.update(each)
    return found


def batches(actor: MegatronTrainer, seed: int) -> list[PackedMicrobatch]:
    sequences = make_sequences(seed)
    return [pack(sequences, members) for members in SHARES[actor.data_parallel_size][actor.data_parallel_rank]]


def learn(both: Pair, seeds: Sequence[int]) -> list[dict[str, float]]:
    """Rollout batches of two steps each, one for each seed: critic first, then the actor."""
    results = []
    for seed in seeds:
        numbers = (2 * seed, 2 * seed + 1)
        steps: Sequence[Sequence[PackedMicrobatch]] = [batches(both.actor, number) for number in numbers]
        with_values = both.critic.with_values(steps)
        for number, step in zip(numbers, both.critic.with_returns(with_values), strict=True):
            results.append(both.critic.train_step(step, totals(make_sequences(number))))
        for number, step in zip(numbers, both.actor.prepare(with_values), strict=True):
            results.append(both.actor.train_step(step, totals(make_sequences(number))))
    return results


# --- one rank ---------------------------------------------------------------------------------------------------------


def critic_matches_dense_reference(world: World) -> dict[str, dict[str, float]]:
    found = {}
    for per_token in (False, True):
        objective = replace(PPO, calculate_per_token_loss=per_token)
        with pair(world, *DESCENT, lr=1.0, clip_grad=0.0, objective=objective, temperature=0.7) as both:
            critic, sequences = both.critic, make_sequences(1)
            before = critic_weights(critic)
            (values,) = critic.with_values([batches(both.actor, 1)])
            (step,) = critic.with_returns([values])
            (prepared,) = both.actor.prepare([values])
            moved = [replace(batch, values=batch.values + np.sin(np.arange(len(batch.values))).astype(np.float32))
                     for batch in step]  # fmt: skip
            metrics = critic.train_step(moved, totals(sequences))
            after = critic_weights(critic)
        expected = dense_critic(world, sequences, before, moved, per_token)
        found["per_token" if per_token else "per_rollout"] = {
            "values": expected.pop("values")(list(step)),
            "targets": expected.pop("targets")(list(prepared)),
            "gradients": max(
                float(((before[name] - after[name]).double() - slope).abs().max())
                for name, slope in expected["slopes"].items()
            ),
            "largest_gradient": max(float(slope.abs().max()) for slope in expected["slopes"].values()),
            "metrics": max(abs(metrics[name] - value) for name, value in expected["metrics"].items()),
            **expected["metrics"],
        }
    return found


def dense_critic(
    world: World, sequences: Sequence[Sequence_], start: Weights, learned: Sequence[PackedMicrobatch], per_token: bool
) -> dict[str, Any]:
    """The same step through the Hugging Face model in float64 and plain loops."""
    from tests.vime.backends.megatron_utils.dense_reference import load_double

    model = load_double(world.checkpoint("tied", seed=3, **MODELS["tied"]))
    head = {name: start[f"head.{name}"].double().requires_grad_() for name in ("weight", "bias")}
    order = [member for members in ONE_RANK[0] for member in members]
    rows = []
    for member in order:
        item = sequences[member]
        ids = torch.as_tensor(item.tokens.astype(np.int64))[None]
        hidden = model.model(ids).last_hidden_state[0]
        prompt = len(item.tokens) - item.response_length
        rows.append((hidden @ head["weight"][0] + head["bias"])[prompt - 1 : -1])
    pairs = [
        gae(float(np.float32(sequences[m].advantage)), [0.0] * len(row), row.tolist(), [1] * len(row), (0.0, 0.9, 0.8))
        for m, row in zip(order, rows, strict=True)
    ]
    old = np.split(np.concatenate([batch.values for batch in learned]), np.cumsum([len(row) for row in rows])[:-1])
    step = [
        ValueSequence(sequences[m].rollout, sequences[m].loss_mask.tolist(), kept.astype(float).tolist(), returns)
        for m, kept, (_, returns) in zip(order, old, pairs, strict=True)
    ]
    loss, metrics = value_step(step, [list(row) for row in rows], clip=0.2, per_token=per_token)
    loss.backward()
    slopes = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    slopes |= {f"head.{name}": parameter.grad for name, parameter in head.items()}

    def largest(batches: Sequence[PackedMicrobatch], name: str, wanted: Sequence[Sequence[float]]) -> float:
        found = np.concatenate([vars(batch)[name] for batch in batches])
        return float(np.abs(found - np.concatenate([np.asarray(each) for each in wanted])).max())

    return {
        "values": lambda batches: max(
            largest(batches, "values", [row.tolist() for row in rows]),
            largest(batches, "token_returns", [returns for _, returns in pairs]),
        ),
        "targets": lambda batches: largest(batches, "token_advantages", [advantages for advantages, _ in pairs]),
        "metrics": metrics,
        "slopes": slopes,
    }


def critic_resumes(world: World) -> dict[str, Any]:
    directory = world.folder / "with_critic"
    with pair(world) as both:
        learn(both, [0])
        both.actor.save(directory, 1)
        both.critic.save(directory, 1)
        uninterrupted = learn(both, [1])
        weights, actor = critic_weights(both.critic), weights_of(both.actor)
    with pair(world, load=False) as both:
        both.actor.load(directory, 1)
        both.critic.load(directory, 1)
        resumed = learn(both, [1])
        found = {
            "metrics": metric_difference(uninterrupted, resumed),
            "weights": largest_difference(weights, critic_weights(both.critic)),
            "actor": largest_difference(actor, weights_of(both.actor)),
            "folders": sorted(path.name for path in (directory / "iter_0000001").iterdir() if path.is_dir()),
        }
        both.actor.save(directory, 2)
        try:
            both.critic.load(directory, 2)
        except VimeError as error:
            found["said"] = f"{type(error).__name__}: {error}"
    return found


def critic_reads(world: World) -> dict[str, int]:
    """How a critic's value pass and its step read a batch that has the sampler's routes."""
    with pair(world) as both:
        lazy = WatchedBatches([with_routes(batch) for batch in batches(both.actor, 1)])
        (learned,) = both.critic.with_returns(both.critic.with_values([lazy]))
        both.critic.train_step(learned, totals(make_sequences(1)))
    return {"batches": len(lazy), "whole": lazy.num_reads, "narrow": lazy.num_narrow_reads}


def with_routes(batch: PackedMicrobatch) -> PackedMicrobatch:
    tokens = np.arange(batch.num_tokens)
    ids = np.zeros((len(tokens), 2, 2), np.uint8)
    return replace(batch, routes=RouteRows(ids, tokens, (0, 1), np.ones(batch.num_sequences, bool)))


def critic_starts_from(world: World) -> dict[str, Any]:
    """First weights from a Hugging Face folder, an actor's checkpoint and a critic's own."""
    found: dict[str, Any] = {}
    other = build_tiny_qwen3(world.folder / f"other_{world.rank}", seed=9, init_std=0.08)
    export, run = world.folder / "critic_export", world.folder / "actor_run"
    with pair(world, load=False, critic={"save": export}) as both:
        both.actor.load_hf()
        both.critic.start()
        backbone, head = critic_weights(both.critic), head_of(both.critic)
        found["head_starts_at_zero"] = all(not parameter.any() for parameter in head.values())
        learn(both, [0])
        both.actor.save(run, 4, write_tracker=True)
        both.critic.save(run, 4)
        trained, actor = critic_weights(both.critic), weights_of(both.actor)
    found["moved"] = largest_difference(trained, backbone)
    sources: dict[str, Path] = {
        "hugging_face": other, "actor": run, "critic": export, "commit": run / "iter_0000004" / "critic",
    }  # fmt: skip
    for name, source in sources.items():
        with pair(world, load=False, critic={"load": source}) as both:
            both.critic.start()
            weights = critic_weights(both.critic)
        if name == "hugging_face":
            from safetensors.torch import load_file

            expected = {**load_file(other / "model.safetensors"), **zero_head(trained)}
        else:
            expected = {**actor, **zero_head(trained)} if name == "actor" else trained
        found[name] = largest_difference(weights, expected)
    with pair(world, load=False, critic={"load": world.folder / "nowhere"}) as both:
        try:
            both.critic.start()
        except VimeError as error:
            found["said"] = f"{type(error).__name__}: {error}"
    return found


def zero_head(weights: Weights) -> Weights:
    return {name: torch.zeros_like(value) for name, value in weights.items() if name.startswith("head.")}


def turns(world: World) -> dict[str, Any]:
    """Training with memory that is moved out and back between turns, and without."""
    found: dict[str, Any] = {}
    variants = {"plain": (), "distributed": ("--use-distributed-optimizer",), "bf16": ("--use-distributed-optimizer",)}
    for name, argv in variants.items():
        precision = "bf16" if name == "bf16" else "fp32"
        with pair(world, *argv, precision=precision) as both:
            staying = learn(both, [0, 1])
            weights, actor = critic_weights(both.critic), weights_of(both.actor)
        with pair(world, *argv, precision=precision, share=True) as both:
            moving = learn(both, [0])
            places = [on_device(both.actor._model), on_device(both.critic._model)]
            moving += learn(both, [1])
            bytes_of_weights = sum(p.numel() * p.element_size() for p in parameters(both.actor))
            left, still = both.actor.rest(), on_device(both.actor._model)
            again = both.actor.rest()
            found[name] = {
                "places": places,
                "same_metrics": staying == moving,
                "critic": largest_difference(weights, critic_weights(both.critic)),
                "actor": largest_difference(actor, weights_of(both.actor)),
                "bytes_left": left,
                "still_there": still,
                "left_twice": again,
                "parameter_bytes": bytes_of_weights,
            }
    return found


def on_device(model: TrainedModel) -> int:
    """Bytes of its weights that are there."""
    return sum(p.untyped_storage().nbytes() for chunk in model.learner.chunks for p in chunk.parameters())


def parameters(actor: MegatronTrainer) -> list[torch.nn.Parameter]:
    return [parameter for chunk in actor._learner.chunks for parameter in chunk.parameters()]


# --- layouts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CriticLayout:
    argv: tuple[str, ...]
    model: str = "tied"

    def compare(self, world: World) -> dict[str, float]:
        # A large epsilon: a small one would turn the rounding of gradients into whole steps.
        options: dict[str, Any] = {"lr": 0.5, "adam_eps": 1.0, "model": self.model}
        with pair(world, *self.argv, **options) as both:
            start = critic_weights(both.critic)
            metrics = learn(both, [0])
            weights, actor = critic_weights(both.critic), weights_of(both.actor)
            directory = world.folder / f"layout_{world.started}"
            both.actor.save(directory, 1)
            both.critic.save(directory, 1)
            further = learn(both, [1])
        if world.rank != 0:
            world.started += 2
            return {}
        with pair(world, size=1, **options) as both:
            alone = learn(both, [0])
            alone_weights, alone_actor = critic_weights(both.critic), weights_of(both.actor)
        same_optimizer = [word for word in self.argv if word == "--use-distributed-optimizer"]
        with pair(world, *same_optimizer, size=1, load=False, **options) as both:
            both.actor.load(directory, 1)
            both.critic.load(directory, 1)
            resumed = learn(both, [1])
        return {
            "metrics": metric_difference(metrics, alone),
            "weights": largest_difference(weights, alone_weights),
            "actor": largest_difference(actor, alone_actor),
            "moved": largest_difference(weights, start),
            "resumed": metric_difference(further, resumed),
        }


TENSOR = ("--tensor-model-parallel-size", "2")
LAYOUTS = {
    "data_distributed": CriticLayout(("--use-distributed-optimizer",)),
    "tensor": CriticLayout(TENSOR),
    "sequence": CriticLayout((*TENSOR, "--sequence-parallel")),
    "pipeline": CriticLayout(("--pipeline-model-parallel-size", "2"), "untied"),
    "pipeline_tied": CriticLayout(("--pipeline-model-parallel-size", "2")),
    "context": CriticLayout(("--context-parallel-size", "2")),
}

SCENARIOS = {
    "critic_matches_dense_reference": critic_matches_dense_reference,
    "critic_reads": critic_reads,
    "critic_resumes": critic_resumes,
    "critic_starts_from": critic_starts_from,
    "turns": turns,
    **{name: functools.partial(CriticLayout.compare, layout) for name, layout in LAYOUTS.items()},
}

if __name__ == "__main__":
    main(SCENARIOS)
