"""One rank of a world that trains under a parallel layout; see `megatron_worker`.

A scenario is one layout. It trains the same batches under it and on one rank and says how far they are apart.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

from tests.vime.backends.megatron_utils.megatron_worker import (
    MODELS,
    RECOMPUTE,
    Weights,
    World,
    largest_difference,
    main,
    metric_difference,
    weigh_by_position,
    weights_of,
)
from tests.vime.backends.megatron_utils.tiny_batches import Sequence_, make_sequences, totals
from tests.vime.backends.megatron_utils.tiny_recorded import pack_recorded, with_routes
from vime.algorithms.importance import WeightKind, WeightRule
from vime.algorithms.objective_config import Estimator, ObjectiveConfig
from vime.algorithms.policy_loss import PolicyLossSettings, PolicyObjective
from vime.backends.megatron_utils.parallel import on_all_ranks
from vime.backends.megatron_utils.trainer import MegatronTrainer
from vime.backends.megatron_utils.trainer_hooks import Hook, TrainerHooks
from vime.data.batch import PackedMicrobatch, RouteRows, tokens_with_successor
from vime.data.trained_tokens import TrainedTokens
from vime.errors import VimeError

SHARES = {
    1: [[[0, 1, 2], [3], [4, 5], [6, 7]]],
    2: [[[0, 1, 2], [4]], [[3, 5], [6, 7]]],
    4: [[[0, 1]], [[2]], [[3, 5]], [[4, 6, 7]]],
    8: [[[member]] for member in range(8)],
}
"""By data-parallel size: microbatches of each rank, as positions in the batch."""

DESCENT: tuple[tuple[str, ...], dict[str, float]] = (("--optimizer", "sgd", "--sgd-momentum", "0"), {"lr": 1.0})
ADAM: tuple[tuple[str, ...], dict[str, float]] = ((), {"lr": 1.0, "adam_eps": 1.0})
"""The distributed optimizer needs Adam; a small epsilon would turn the rounding of gradients into whole steps."""


def weigh_first_and_last(term: torch.Tensor, lengths: Sequence[int], masks: Sequence[torch.Tensor]) -> torch.Tensor:
    """A reducer of the user's own: a product of two tokens of each response, which no part of it could compute."""
    rows = zip(torch.split(term, list(lengths)), masks, strict=True)
    return torch.stack([(row.sum() + row[0] * row[-1]) / mask.sum().clamp(min=1) for row, mask in rows]).sum()


OBJECTIVES = {
    "sequence_ratio": ObjectiveConfig(
        estimator=Estimator.GSPO, use_rollout_logprobs=False, opsm_delta=1e-4, entropy_coef=0.01
    ),
    "top_k": ObjectiveConfig(
        policy=PolicyLossSettings(PolicyObjective.REINFORCE),
        weight_rule=WeightRule(WeightKind.TIS, 0.0, 2.0),
        centers_scores=True,
    ),
}
OBJECTIVES["own_functions"] = ObjectiveConfig(
    estimator=Estimator.CISPO,
    policy=PolicyLossSettings(PolicyObjective.CISPO, 1.0),
    weighting=weigh_by_position,
    reducer=lambda _, lengths, masks, __: lambda term: weigh_first_and_last(term, lengths, masks),
)
OBJECTIVES["nucleus"] = OBJECTIVES["routes"] = OBJECTIVES["own_routes"] = OBJECTIVES["top_k"]
DENSE_KINDS = ("sequence_ratio", "top_k", "nucleus", "own_functions")
EXPERT_KINDS = ("sequence_ratio", "routes", "own_routes")
MASKED_SAMPLE = 103

LAYOUT_MODELS = {**MODELS, "deep_experts": {**MODELS["experts"], "num_hidden_layers": 4}}

TENSOR = ("--tensor-model-parallel-size", "2")
PIPELINE = ("--pipeline-model-parallel-size", "2")
VIRTUAL = (*PIPELINE, "--num-layers-per-virtual-pipeline-stage", "1")
EXPERTS = ("--expert-model-parallel-size", "2")
ZIGZAG = ("--context-parallel-size", "2")
CONTIGUOUS = (*ZIGZAG, "--cp-comm-type", "allgather")


@dataclass(frozen=True)
class Outcome:
    metrics: list[dict[str, float]]
    weights: Weights
    log_probs: list[npt.NDArray[np.float32]]
    tokens: list[dict[int, TrainedTokens]]
    """Of each step, as the one rank tells it that speaks for a sample."""


@dataclass(frozen=True)
class Layout:
    argv: tuple[str, ...]
    model: str = "tied"
    precision: str = "fp32"
    """Of the ranks that share the work; the one rank computes in fp32."""

    @property
    def kinds(self) -> tuple[str, ...]:
        return EXPERT_KINDS if "experts" in self.model else DENSE_KINDS

    @property
    def optimizer(self) -> tuple[tuple[str, ...], dict[str, float]]:
        return ADAM if "--use-distributed-optimizer" in self.argv else DESCENT

    def options(self, world: World, kind: str) -> dict[str, Any]:
        checkpoint = world.checkpoint(self.model, seed=3, **LAYOUT_MODELS[self.model])
        options = {"hf_checkpoint": checkpoint, "objective": OBJECTIVES[kind], "temperature": 0.8}
        replay = {"replay_routes": kind in ("routes", "own_routes"), "record_routes": kind == "own_routes"}
        return {**options, **replay, **self.optimizer[1]}

    def compare(self, world: World) -> dict[str, dict[str, float]]:
        found = {}
        for kind in self.kinds:
            options = self.options(world, kind)
            with world.trainer(*self.optimizer[0], *self.argv, precision=self.precision, **options) as trainer:
                split = train(trainer, kind)
            alone = self.on_one_rank(world, kind)
            if alone is not None:
                found[kind] = distances(split, alone, load_file(options["hf_checkpoint"] / "model.safetensors"))
        return found

    def on_one_rank(self, world: World, kind: str) -> Outcome | None:
        """The same training on rank 0 only, once for each model, optimizer and kind of batch."""
        key = (self.model, self.optimizer[0], kind)
        if world.rank == 0 and key not in _ALONE:
            with world.trainer(*self.optimizer[0], size=1, **self.options(world, kind)) as trainer:
                _ALONE[key] = train(trainer, kind)
        else:
            world.started += 1
        return _ALONE.get(key)


_ALONE: dict[tuple[str, tuple[str, ...], str], Outcome] = {}


def batches_of(trainer: MegatronTrainer, kind: str, seed: int) -> list[PackedMicrobatch]:
    sequences = make_sequences(seed)
    members = SHARES[trainer.data_parallel_size][trainer.data_parallel_rank]
    return [own_part(pack_kind(kind, sequences, each), trainer) for each in members]


def own_part(packed: PackedMicrobatch, trainer: MegatronTrainer) -> PackedMicrobatch:
    """With the routes of the rank's own layers and tokens alone, as it reads them."""
    rows, part = packed.routes, trainer.route_part
    if rows is None or part is None:
        return packed
    own = np.isin(rows.tokens, part.tokens(np.diff(packed.cu_seqlens).tolist()))
    ids = rows.ids[own][:, list(part.places)]
    return dataclasses.replace(packed, routes=RouteRows(ids, rows.tokens[own], part.layers, rows.recorded))


def pack_kind(kind: str, sequences: Sequence[Sequence_], members: Sequence[int]) -> PackedMicrobatch:
    packed = pack_recorded("nucleus" if kind == "nucleus" else "top_k", sequences, members)
    return with_routes(packed, num_layers=4, absent=[MASKED_SAMPLE]) if kind == "routes" else packed


def train(trainer: MegatronTrainer, kind: str, seeds: Sequence[int] = (0, 1)) -> Outcome:
    """A rollout batch of one step for each seed, prepared as a whole, and log-probabilities after it."""
    steps = trainer.prepare([batches_of(trainer, kind, seed) for seed in seeds])
    metrics, tokens = [], []
    for step, seed in zip(steps, seeds, strict=True):
        metrics.append(trainer.train_step(step, totals(make_sequences(seed))))
        told = [entry for rank in on_all_ranks(trainer.trained_tokens) for entry in rank.items()]
        tokens.append(dict(told))
        assert len(tokens[-1]) == len(told), "one rank speaks for a sample"
    probe = [pack_kind(kind, make_sequences(7), [member]) for member in range(8)]
    return Outcome(metrics, weights_of(trainer), trainer.log_probs(probe), tokens)


def distances(split: Outcome, alone: Outcome, start: Weights) -> dict[str, float]:
    """Largest differences; the first step's gradient norm is among the metrics."""
    log_probs = zip(split.log_probs, alone.log_probs, strict=True)
    return {
        "weights": largest_difference(split.weights, alone.weights),
        "metrics": metric_difference(split.metrics, alone.metrics),
        **loss_and_norm(split.metrics, alone.metrics),
        "log_probs": max(float(np.abs(one - other).max()) for one, other in log_probs),
        "tokens": max(token_difference(one, other) for one, other in zip(split.tokens, alone.tokens, strict=True)),
        "moved": largest_difference(alone.weights, start),
        "replayed": alone.metrics[0].get("num_replayed_routes", 0.0),
    }


def token_difference(one: dict[int, TrainedTokens], other: dict[int, TrainedTokens]) -> float:
    """The largest one of what is told of each token."""
    assert one.keys() == other.keys()
    return max(
        float(np.abs(np.array(mine) - np.array(theirs)).max())
        for index in one
        for mine, theirs in zip(vars(one[index]).values(), vars(other[index]).values(), strict=True)
    )


def loss_and_norm(split: Sequence[Mapping[str, float]], alone: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Largest difference of a step's loss, and of its gradient norm in parts of it."""
    pairs = list(zip(split, alone, strict=True))
    return {
        "loss": max(abs(one["loss"] - other["loss"]) for one, other in pairs),
        "grad_norm": max(abs(one["grad_norm"] / other["grad_norm"] - 1) for one, other in pairs),
    }


LAYOUTS = {
    "zigzag": Layout(ZIGZAG),
    "contiguous": Layout(CONTIGUOUS),
    "zigzag_tensor": Layout((*ZIGZAG, *TENSOR)),
    "contiguous_sequence": Layout((*CONTIGUOUS, *TENSOR, "--sequence-parallel")),
    "zigzag_pipeline": Layout((*ZIGZAG, *PIPELINE), "untied"),
    "contiguous_data": Layout(CONTIGUOUS),
    "tensor": Layout(TENSOR),
    "sequence": Layout((*TENSOR, "--sequence-parallel")),
    "pipeline": Layout(PIPELINE, "untied"),
    "virtual": Layout(VIRTUAL, "deep"),
    "distributed": Layout(("--use-distributed-optimizer",)),
    "experts": Layout(EXPERTS, "experts"),
    "experts_tensor": Layout(TENSOR, "experts"),
    "experts_recompute": Layout((*TENSOR, *RECOMPUTE), "experts"),
    "experts_pipeline_recompute": Layout((*PIPELINE, *RECOMPUTE), "experts"),
    "experts_zigzag": Layout(ZIGZAG, "experts"),
    "experts_contiguous": Layout(CONTIGUOUS, "experts"),
    "experts_pipeline": Layout(PIPELINE, "experts"),
    "experts_virtual": Layout((*VIRTUAL, *RECOMPUTE), "deep_experts"),
    "experts_distributed": Layout((*EXPERTS, "--use-distributed-optimizer"), "experts"),
    "tensor_data_distributed": Layout((*TENSOR, "--sequence-parallel", "--use-distributed-optimizer")),
    "tensor_pipeline": Layout((*TENSOR, *PIPELINE, "--sequence-parallel"), "untied"),
    "tensor_virtual": Layout((*TENSOR, *VIRTUAL), "deep"),
    "experts_of_tensor_ranks": Layout((*EXPERTS, *TENSOR, "--expert-tensor-parallel-size", "1"), "experts"),
    "cut_experts": Layout((*EXPERTS, *TENSOR, "--expert-tensor-parallel-size", "2"), "experts"),
    "experts_zigzag_data": Layout((*EXPERTS, *ZIGZAG), "experts"),
    "experts_pipeline_data": Layout((*EXPERTS, *PIPELINE), "experts"),
}


def replayed_routes(world: World) -> dict[str, Any]:
    """The experts that the Hugging Face model chooses, replayed, and others in their place."""
    from transformers import AutoModelForCausalLM

    checkpoint = world.checkpoint("experts", seed=3, **MODELS["experts"])
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    sequences = make_sequences(0)
    packed = pack_kind("top_k", sequences, range(8))
    chosen = []
    with torch.no_grad():
        for item in sequences:
            tokens = torch.tensor(item.tokens[None].astype(np.int64))
            layers = model(tokens, output_router_logits=True).router_logits
            chosen.append(torch.stack([logits.topk(2).indices for logits in layers], 1)[:-1].numpy().astype(np.uint8))
    own = RouteRows(np.concatenate(chosen), tokens_with_successor(packed.cu_seqlens), (0, 1), np.ones(8, bool))
    said = ""
    with world.trainer(hf_checkpoint=checkpoint, replay_routes=True) as trainer:
        free = trainer.log_probs([packed])[0]
        same = trainer.log_probs([dataclasses.replace(packed, routes=own)])[0]
        others = dataclasses.replace(packed, routes=dataclasses.replace(own, ids=(own.ids + 1) % 8))
        other = trainer.log_probs([others])[0]
        ignored = trainer.log_probs([others], replay_routes=False)[0]
        try:
            trainer.train_step([with_routes(packed, absent=[102])], totals(sequences))
        except VimeError as error:
            said = f"{type(error).__name__}: {error}"
    hooked: list[str] = []
    hooks = TrainerHooks(before_log_prob=Hook("--flag", "own", lambda *given: hooked.append(given[-1])))
    own_experts = {"replay_routes": True, "record_routes": True, "hooks": hooks}
    with world.trainer(hf_checkpoint=checkpoint, lr=0.1, **own_experts) as trainer:
        ((prepared,),) = trainer.prepare([[packed]])
        metrics = trainer.train_step([prepared], totals(sequences))
        later = {
            name: trainer.log_probs([dataclasses.replace(packed, routes=rows)])[0]
            for name, rows in {"recorded": prepared.routes, "own": own, "free": None}.items()
        }
    recorded = prepared.routes
    assert recorded is not None
    found = recorded.ids[np.isin(recorded.tokens, own.tokens)]
    return {
        "recorded": bool((np.sort(found) == np.sort(own.ids)).all()),
        "fraction": metrics["routing_replay_fraction"],
        "recorded_later": float(np.abs(later["recorded"] - later["own"]).max()),
        "free_later": float(np.abs(later["recorded"] - later["free"]).max()),
        "same": float(np.abs(same - free).max()),
        "other": float(np.abs(other - free).max()),
        "ignored": float(np.abs(ignored - free).max()),
        "said": said,
        "hooked": hooked,
    }


DISTRIBUTED = ("--use-distributed-optimizer",)


@dataclass(frozen=True)
class Chain:
    """One step under each layout, resumed from the checkpoint that the one before it saved; the last on one rank."""

    model: str
    links: tuple[tuple[str, ...], ...]
    everywhere: tuple[str, ...] = ()
    ends_on_one_rank: bool = True
    sizes: tuple[int, ...] = ()
    """Ranks of each link, the first ones of the world; all of it when left out."""
    kind: str = "top_k"
    precision: str = "fp32"
    """Of the chain; what it is compared with computes in fp32."""
    timeout_s: float = 60.0

    def compare(self, world: World) -> dict[str, Any]:
        directory = world.folder / f"chain_{world.started}"
        sizes = self.sizes or (world.size,) * len(self.links)
        links = [((*self.everywhere, *argv), size) for argv, size in zip(self.links, sizes, strict=True)]
        if self.ends_on_one_rank:
            links.append((self.everywhere, 1))
        metrics: list[dict[str, float]] = []
        weights: Weights = {}
        for number, (argv, size) in enumerate(links):
            if world.rank >= size:
                world.started += 1
                continue
            with self.trainer(world, number, argv, size, self.precision) as trainer:
                if number:
                    trainer.load(directory, number)
                metrics.append(self.step(trainer, number))
                if number + 1 < len(links):
                    trainer.save(directory, number + 1)
                weights = weights_of(trainer)
        if world.rank != 0:
            world.started += 1
            return {}
        with self.trainer(world, 0, (), 1) as trainer:
            start = weights_of(trainer)
            alone = [self.step(trainer, number) for number in range(len(links))]
            expected = weights_of(trainer)
        return {
            "metrics": [metric_difference([one], [other]) for one, other in zip(metrics, alone, strict=True)],
            "weights": largest_difference(weights, expected),
            "moved": largest_difference(expected, start),
            "norms": [step["grad_norm"] for step in alone],
            **loss_and_norm(metrics, alone),
        }

    def trainer(self, world: World, number: int, argv: tuple[str, ...], size: int, precision: str = "fp32") -> Any:
        options: dict[str, Any] = {"lr": 0.02, "adam_eps": 0.1, "objective": OBJECTIVES[self.kind]}
        options["hf_checkpoint"] = world.checkpoint(self.model, seed=3, **LAYOUT_MODELS[self.model])
        options |= {"replay_routes": self.kind == "routes", "precision": precision, "timeout_s": self.timeout_s}
        return world.trainer(*argv, size=size, load=number == 0, **options)

    def step(self, trainer: MegatronTrainer, seed: int) -> dict[str, float]:
        return trainer.train_step(batches_of(trainer, self.kind, seed), totals(make_sequences(seed)))


DENSE_LINKS = (ZIGZAG, TENSOR, VIRTUAL, CONTIGUOUS, PIPELINE, ())
CHAINS = {
    "chain_plain": Chain("deep", DENSE_LINKS),
    "chain_distributed": Chain("deep", DENSE_LINKS, DISTRIBUTED),
    "chain_experts": Chain("experts", (ZIGZAG, TENSOR, PIPELINE, ())),
    "chain_expert_ranks": Chain(
        "experts",
        (
            (),
            TENSOR,
            (*PIPELINE, *ZIGZAG),
            (*TENSOR, "--expert-tensor-parallel-size", "1"),
            ("--expert-model-parallel-size", "4"),
        ),
        (*EXPERTS, *DISTRIBUTED),
        ends_on_one_rank=False,
    ),
}


def other_expert_layout(world: World) -> dict[str, str]:
    """What is said when experts that were spread over ranks are resumed where each rank has all of them."""
    options: dict[str, Any] = {"hf_checkpoint": world.checkpoint("experts", seed=3, **MODELS["experts"]), "load": False}
    directory = world.folder / "spread_experts"
    with world.trainer(*EXPERTS, **options) as trainer:
        trainer.save(directory, 1)
    said = ""
    with world.trainer(**options) as trainer:
        try:
            trainer.load(directory, 1)
        except VimeError as error:
            said = f"{type(error).__name__}: {error}"
    return {"said": said}


def refused_layouts(world: World) -> dict[str, str]:
    said = ""
    try:
        with world.trainer(*ZIGZAG, "--cp-comm-type", "a2a", load=False):
            pass
    except VimeError as error:
        said = f"{type(error).__name__}: {error}"
    return {"said": said}


IN_BF16 = {
    f"bf16_{name}": dataclasses.replace(LAYOUTS[name], precision="bf16")
    for name in ("tensor", "pipeline", "zigzag", "distributed", "experts", "experts_distributed")
}

SCENARIOS: dict[str, Callable[[World], Any]] = {
    **{name: functools.partial(Layout.compare, layout) for name, layout in (LAYOUTS | IN_BF16).items()},
    **{name: functools.partial(Chain.compare, chain) for name, chain in CHAINS.items()},
    "other_expert_layout": other_expert_layout,
    "refused_layouts": refused_layouts,
    "replayed_routes": replayed_routes,
}

if __name__ == "__main__":
    main(SCENARIOS)
