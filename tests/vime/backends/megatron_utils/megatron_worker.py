"""One rank of a test world: runs scenarios by name and writes what rank 0 found as JSON.

Run as `python megatron_worker.py FOLDER RANK WORLD_SIZE SCENARIO...`. A scenario is a function of `World`; it starts
as many trainers as it needs, one after the other.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import build_tiny_qwen3
from tests.support.watched_batches import WatchedBatches
from tests.vime.backends.megatron_utils.tiny_batches import Sequence_, make_sequences, pack, totals
from tests.vime.backends.megatron_utils.tiny_recorded import pack_recorded
from vime.algorithms.importance import WeightKind, WeightRule
from vime.algorithms.objective_config import Estimator, ObjectiveConfig
from vime.algorithms.parity import Readings, compare
from vime.algorithms.policy_loss import PolicyLossSettings, PolicyObjective
from vime.backends.megatron_utils.config import TrainerConfig
from vime.backends.megatron_utils.trainer import MegatronTrainer  # isort: split

from vime.backends.megatron_utils.background_save import BackgroundSave
from vime.data.batch import PackedMicrobatch
from vime.errors import VimeError

ONE_RANK = [[[0, 1, 2], [3], [4, 5], [6, 7]]]
TWO_RANKS = [[[0, 1, 2], [4]], [[3, 5], [6, 7]]]
"""Microbatches of each data-parallel rank, as positions in the batch; the ranks hold different numbers of tokens."""

RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")

MODELS: dict[str, dict[str, Any]] = {
    "tied": {"tied": True},
    "untied": {"tied": False},
    "deep": {"tied": False, "num_hidden_layers": 4},
    "experts": {"tied": False, "num_experts": 8, "norm_topk_prob": True},
}
Weights = dict[str, torch.Tensor]


@dataclass
class World:
    folder: Path
    rank: int
    size: int
    started: int = field(default=0)

    def checkpoint(self, name: str, **options: Any) -> Path:
        """A tiny checkpoint, made once by rank 0 before the ranks meet."""
        path = self.folder / f"hf_{name}_{self.rank}"
        return path if path.exists() else build_tiny_qwen3(path, init_std=0.08, **options)

    @contextmanager
    def trainer(
        self, *argv: str, size: int | None = None, load: bool = True, **options: Any
    ) -> Iterator[MegatronTrainer]:
        """A trainer on the first `size` ranks (all by default)."""
        self.started += 1
        options.setdefault("hf_checkpoint", self.checkpoint("tied"))
        config = TrainerConfig(**{"megatron_argv": argv, "lr": 5e-3, "num_threads": 1, "timeout_s": 60.0, **options})
        store = f"file://{self.folder}/store{self.started}"
        with MegatronTrainer(config, self.rank, size or self.size, store) as trainer:
            if load:
                trainer.load_hf()
            yield trainer


def weigh_by_position(**given: Any) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """A weighting of the user's own: later tokens of a response count less, and a metric says how much."""
    device = given["pg_loss"].device
    weight = torch.cat([1 / torch.arange(1.0, length + 1, device=device) for length in given["response_lengths"]])
    return given["pg_loss"] * weight, given["loss_masks"], {"position_weight": weight}


def weights_of(trainer: MegatronTrainer) -> Weights:
    return {name: tensor.to("cpu", copy=True) for name, tensor in trainer.named_hf_weights()}


def largest_difference(one: Weights, other: Weights) -> float:
    assert sorted(one) == sorted(other)
    return max((float((one[name] - other[name]).abs().max()) for name in one), default=0.0)


def train(
    trainer: MegatronTrainer, steps: Sequence[int], split: Sequence[Sequence[Sequence[int]]]
) -> list[dict[str, float]]:
    """One step for each seed in `steps`, on this rank's share of `split`."""
    results = []
    for seed in steps:
        sequences = make_sequences(seed)
        mine = [pack(sequences, members) for members in split[trainer.data_parallel_rank]]
        results.append(trainer.train_step(mine, totals(sequences)))
    return results


def alone(world: World, steps: Sequence[int], *argv: str, **options: Any) -> tuple[list[dict[str, float]], Weights]:
    """The same training on rank 0 only; other ranks return empty results."""
    if world.rank != 0:
        world.started += 1
        return [], {}
    with world.trainer(*argv, size=1, **options) as trainer:
        return train(trainer, steps, ONE_RANK), weights_of(trainer)


def metric_difference(one: list[dict[str, float]], other: list[dict[str, float]]) -> float:
    """Largest difference of a metric; of one above 1, such as a gradient's norm, in parts of it."""
    pairs = [(a[name], b[name]) for a, b in zip(one, other, strict=False) for name in a]
    return max((abs(first - second) / max(1.0, abs(second)) for first, second in pairs), default=0.0)


def compare_with_one_rank(world: World, *argv: str, split: Any, steps: int = 3, **options: Any) -> dict[str, float]:
    seeds = range(steps)
    with world.trainer(*argv, **options) as trainer:
        metrics, weights = train(trainer, seeds, split), weights_of(trainer)
    single_metrics, single_weights = alone(
        world, seeds, *argv[: argv.index("0") + 1 if "sgd" in argv else 0], **options
    )
    if world.rank != 0:
        return {}
    return {
        "weights": largest_difference(weights, single_weights),
        "metrics": metric_difference(metrics, single_metrics),
        "moved": largest_difference(weights, load_file(world.checkpoint("tied") / "model.safetensors")),
    }


# --- one rank ---------------------------------------------------------------------------------------------------------


def logits_match_hugging_face(world: World) -> dict[str, dict[str, float]]:
    from tests.vime.backends.megatron_utils.dense_reference import dense_logits, load_double
    from vime.backends.megatron_utils.model import training_device
    from vime.backends.megatron_utils.packing import to_tensors

    found = {}
    for name, options in MODELS.items():
        checkpoint = world.checkpoint(name, seed=3, **options)
        sequences = make_sequences(0)
        with world.trainer(hf_checkpoint=checkpoint) as trainer, torch.no_grad():

            def run(batch: PackedMicrobatch, trainer: MegatronTrainer = trainer) -> torch.Tensor:
                tensors = to_tensors(batch, training_device())
                logits = trainer._learner.chunks[0](
                    tensors.tokens, tensors.position_ids, None, packed_seq_params=tensors.packed
                )
                return logits[0].cpu()

            packed = run(pack(sequences, range(8)))
            separate = torch.cat([run(pack(sequences, [member])) for member in range(8)])
            log_probs = trainer.log_probs([pack(sequences, range(8))])[0]
        reference_model = load_double(checkpoint)
        with torch.no_grad():
            rows = [dense_logits(reference_model, item.tokens) for item in sequences]
        expected = []
        for row, item in zip(rows, sequences, strict=True):
            prompt = len(item.tokens) - item.response_length
            targets = torch.as_tensor(item.tokens[prompt:].astype(np.int64))[:, None]
            expected.append(row[prompt - 1 : -1].log_softmax(-1).gather(1, targets)[:, 0])
        found[name] = {
            "packed_to_separate": float((packed - separate).abs().max()),
            "packed_to_hf": float((packed - torch.cat(rows)).abs().max()),
            "log_probs": float(np.abs(log_probs - torch.cat(expected).numpy()).max()),
            "spread": float(packed.std()),
        }
    return found


def gradients_match_dense_reference(world: World) -> dict[str, dict[str, float]]:
    from tests.vime.backends.megatron_utils.dense_reference import load_double, step_reference

    found = {}
    sequences = make_sequences(1)
    for per_token in (False, True):
        policy = PolicyLossSettings(eps_clip=0.1, eps_clip_high=0.25, eps_clip_c=1.5)
        with world.trainer(
            *("--optimizer", "sgd", "--sgd-momentum", "0"),
            objective=ObjectiveConfig(policy=policy, calculate_per_token_loss=per_token),
            temperature=0.7,
            lr=1.0,
            clip_grad=0.0,
            log_probs_chunk_size=7,
        ) as trainer:
            before = weights_of(trainer)
            metrics = train(trainer, [1], ONE_RANK)[0]
            after = weights_of(trainer)
        model = load_double(world.checkpoint("tied"))
        expected = step_reference(model, sequences, temperature=0.7, eps=(0.1, 0.25, 1.5), per_token=per_token)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        moved = {name: before[name].double() - after[name].double() for name in before}
        found["per_token" if per_token else "per_rollout"] = {
            "metrics": max(abs(metrics[name] - value) for name, value in expected.items()),
            "gradients": max(float((moved[name] - gradients[name]).abs().max()) for name in moved),
            "largest_gradient": max(float(gradients[name].abs().max()) for name in moved),
            "clipfrac": expected["pg_clipfrac"],
            "grad_norm": abs(metrics["grad_norm"] - sum(float((g**2).sum()) for g in gradients.values()) ** 0.5),
        }
    return found


def weights_round_trip(world: World) -> dict[str, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    found = {}
    for name, options in MODELS.items():
        checkpoint = world.checkpoint(name, seed=3, **options)
        original = load_file(checkpoint / "model.safetensors")
        with world.trainer(hf_checkpoint=checkpoint) as trainer:
            first, second = weights_of(trainer), [key for key, _ in trainer.named_hf_weights()]
            trainer.save_hf(world.folder / f"saved_{name}")
        saved = load_file(world.folder / f"saved_{name}" / "model.safetensors")
        AutoModelForCausalLM.from_pretrained(world.folder / f"saved_{name}")
        found[name] = {
            "same_names": set(first) == set(original) and list(first) == second,
            "bitwise": all(torch.equal(first[key], original[key]) for key in original),
            "saved": all(torch.equal(saved[key], original[key]) for key in original),
        }
    return found


def resume_and_replay(world: World) -> dict[str, dict[str, Any]]:
    found = {}
    growing = ("--start-weight-decay", "0.0", "--end-weight-decay", "0.5", "--weight-decay-incr-style", "linear")
    variants = {
        "plain": (),
        "distributed": ("--use-distributed-optimizer",),
        "growing_decay": growing,
        "growing_decay_distributed": (*growing, "--use-distributed-optimizer"),
    }
    for name, argv in variants.items():
        options = {"lr_decay_style": "linear", "train_iters": 10, "weight_decay": 0.1}
        directory = world.folder / f"resume_{name}"
        with world.trainer(*argv, **options) as trainer:
            trainer.save(directory, 0)
            train(trainer, range(3), ONE_RANK)
            folder = trainer.save(directory, 3)
            uninterrupted = train(trainer, range(3, 6), ONE_RANK)
            weights = weights_of(trainer)
        with world.trainer(*argv, load=False, **options) as trainer:
            trainer.load(directory, 0)
            train(trainer, range(6), ONE_RANK)
            untrained = largest_difference(weights, weights_of(trainer))
        replays = []
        for _ in range(2):
            with world.trainer(*argv, load=False, **options) as trainer:
                trainer.load(directory, 3)
                resumed = train(trainer, range(3, 6), ONE_RANK)
                replays.append((resumed, weights_of(trainer)))
                draws = (torch.rand(3).tolist(), np.random.rand(3).tolist())
        found[name] = {
            "folder": folder.name,
            "from_start": untrained,
            "tracker": (directory / "latest_checkpointed_iteration.txt").exists(),
            "metrics": metric_difference(uninterrupted, replays[0][0]),
            "weights": largest_difference(weights, replays[0][1]),
            "replay": largest_difference(replays[0][1], replays[1][1]),
            "learning_rates": [step["lr"] for step in uninterrupted],
            "draws": draws,
        }
    return found


def background_save(world: World) -> dict[str, dict[str, Any]]:
    """Take a copy, train on before anything is written, then write it, load it and train the same again."""
    found = {}
    split = ONE_RANK if world.size == 1 else TWO_RANKS
    for name, argv in (("plain", ()), ("distributed", ("--use-distributed-optimizer",))):
        directory, may_write, saving = world.folder / f"background_{name}", threading.Event(), BackgroundSave()
        with world.trainer(*argv) as trainer:
            train(trainer, range(2), split)
            saved = weights_of(trainer)
            folder = trainer.save(directory, 2, write_tracker=True, background=saving)
            saving.start(may_write.wait, lambda: None)
            later, final = train(trainer, range(2, 4), split), weights_of(trainer)
            early = sorted(path.name for path in directory.rglob("*") if path.is_file())
            torch.distributed.barrier()  # each rank has an event of its own
            may_write.set()
            saving.wait()
            saving.finish()
        with world.trainer(*argv, load=False) as trainer:
            trainer.load(directory, 2)
            found[name] = {
                "early": early,
                "saved": largest_difference(saved, weights_of(trainer)),
                "metrics": metric_difference(later, train(trainer, range(2, 4), split)),
                "final": largest_difference(final, weights_of(trainer)),
                "moved": largest_difference(saved, final),
                "tracker": (directory / "latest_checkpointed_iteration.txt").read_text(),
                "whole": (folder / "metadata.json").is_file(),
            }
    return found


def weights_only_load(world: World) -> dict[str, dict[str, float]]:
    """Train, load the weights of the file again, take a step at learning rate zero."""
    found = {}
    for name, argv in (("plain", ()), ("distributed", ("--use-distributed-optimizer",))):
        for precision in ("fp32", "bf16"):
            with world.trainer(*argv, precision=precision) as trainer:
                loaded = weights_of(trainer)
                train(trainer, range(2), ONE_RANK)
                moved = largest_difference(loaded, weights_of(trainer))
                trainer.load_hf()
                for group in trainer._learner.optimizer.param_groups:
                    group["lr"] = 0.0
                train(trainer, [2], ONE_RANK)
                found[f"{name}_{precision}"] = {
                    "moved": moved,
                    "after": largest_difference(loaded, weights_of(trainer)),
                }
    return found


def refusals(world: World) -> dict[str, str]:
    """The message of each refusal, empty where nothing was refused."""
    said = {}

    @contextmanager
    def expect(name: str) -> Iterator[None]:
        said[name] = ""
        try:
            yield
        except VimeError as error:
            said[name] = f"{type(error).__name__}: {error}"

    with expect("flag"), world.trainer("--tensor-model-paralel-size", "2"):
        pass
    with expect("value"), world.trainer("--recompute-granularity", "everything"):
        pass
    with expect("decay"), world.trainer("--lr-decay-style", "cosine"):
        pass
    with expect("assertion"), world.trainer("--min-lr", "1"):
        pass
    with expect("schedule"), world.trainer("--lr-warmup-init", "1"):
        pass
    broken = build_tiny_qwen3(world.folder / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.9.extra.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with expect("names"), world.trainer(hf_checkpoint=broken):
        pass
    with world.trainer() as trainer:
        sequences = make_sequences(0)
        first, second = pack(sequences, [0, 1]), pack(sequences, [2, 4])
        second.advantages[1] = np.nan
        before = weights_of(trainer)
        with expect("nan"):
            trainer.train_step([first, second], totals(sequences))
        said["weights_kept"] = str(largest_difference(before, weights_of(trainer)) == 0.0)
        with expect("empty"):
            trainer.train_step([], totals(sequences))
        with expect("no_checkpoint"):
            trainer.load(world.folder, 77)
        train(trainer, [0], ONE_RANK)
        saved_place = trainer._learner.scheduler.num_steps
        assert saved_place > 0
        said["rates"] = json.dumps(rates_of(trainer))
        trainer.save(world.folder / "twice", 1, write_tracker=True)
        said["tracker"] = (world.folder / "twice" / "latest_checkpointed_iteration.txt").read_text()
        with expect("not_empty"):
            trainer.save(world.folder / "twice", 1)
    for name, flags, options in (
        ("new_rate", [], {"lr": 7e-3}),
        ("overridden_rate", ["--override-opt-param-scheduler"], {"lr": 7e-3}),
        ("new_decay", [], {"weight_decay": 0.5}),
        ("saved_rates", ["--use-checkpoint-opt_param-scheduler"], {"lr": 7e-3, "weight_decay": 0.5}),
    ):
        with world.trainer(*flags, load=False, **options) as trainer:
            trainer.load(world.folder / "twice", 1)
            said[name] = json.dumps([trainer._learner.scheduler.num_steps - saved_place, *rates_of(trainer)])
    return said


def rates_of(trainer: MegatronTrainer) -> tuple[float, float]:
    """The largest learning rate, and its weight decay, that the next step takes."""
    return max((group["lr"], group["weight_decay"]) for group in trainer._learner.optimizer.param_groups)


SAMPLER_TEMPERATURE = 0.7


@torch.no_grad()
def sampled_by(
    model: Any, *, draw_temperature: float, said_temperature: float, bf16_head: bool = False, count: int = 24
) -> PackedMicrobatch:
    """Sequences that a Hugging Face model writes token by token, with what it says of each token."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 50, (count, 3), generator=generator)
    said = []
    for _ in range(12):
        hidden = model.model(tokens).last_hidden_state[:, -1]
        head = model.lm_head.weight
        logits = (hidden.bfloat16() @ head.bfloat16().T).float() if bf16_head else hidden @ head.T
        chosen = torch.multinomial((logits / draw_temperature).softmax(-1), 1, generator=generator)
        said.append((logits / said_temperature).log_softmax(-1).gather(1, chosen))
        tokens = torch.cat([tokens, chosen], 1)
    sequences = [
        Sequence_(
            index=number,
            rollout=number,
            tokens=row.numpy().astype(np.int32),
            loss_mask=np.ones(12, np.uint8),
            sampler_log_probs=values.numpy(),
            advantage=0.0,
        )
        for number, (row, values) in enumerate(zip(tokens, torch.cat(said, 1), strict=True))
    ]
    return pack(sequences, range(count))


def planted_faults(world: World) -> dict[str, Any]:
    """What the comparison says of a Hugging Face sampler that has each of the known faults."""
    from transformers import AutoModelForCausalLM

    start = world.checkpoint("tied")
    found: dict[str, Any] = {}
    with world.trainer(hf_checkpoint=start, temperature=SAMPLER_TEMPERATURE) as trainer:
        train(trainer, [0], ONE_RANK)
        trainer.save_hf(world.folder / "probed")
        current, before = AutoModelForCausalLM.from_pretrained(world.folder / "probed"), weights_of(trainer)
        old = AutoModelForCausalLM.from_pretrained(start)
        right = {"draw_temperature": SAMPLER_TEMPERATURE, "said_temperature": SAMPLER_TEMPERATURE}
        samplers: dict[str, tuple[Any, dict[str, Any]]] = {
            "none": (current, right),
            "raw_log_probs": (current, {**right, "said_temperature": 1.0}),
            "no_temperature": (current, {"draw_temperature": 1.0, "said_temperature": 1.0}),
            "head_precision": (current, {**right, "bf16_head": True}),
            "stale_weights": (old, right),
        }
        for name, (model, options) in samplers.items():
            packed = sampled_by(model, **options)
            report = compare(
                Readings(
                    sampler=packed.sampler_log_probs,
                    **trainer.probe([packed]),
                    start_weights=trainer.probe_start_weights([packed]),
                    cached=np.zeros(len(packed.loss_mask), bool),
                    temperature=SAMPLER_TEMPERATURE,
                )
            )
            found[name] = {"fault": report.fault, "mean": report.gap.mean}
        found["kept"] = largest_difference(before, weights_of(trainer))
    return found


# --- two ranks --------------------------------------------------------------------------------------------------------


def data_parallel(world: World) -> dict[str, dict[str, float]]:
    return {
        "per_rollout": compare_with_one_rank(world, split=TWO_RANKS),
        "per_token": compare_with_one_rank(
            world, split=TWO_RANKS, objective=ObjectiveConfig(calculate_per_token_loss=True)
        ),
        "distributed": compare_with_one_rank(world, "--use-distributed-optimizer", split=TWO_RANKS),
    }


def resume_on_fewer_ranks(world: World) -> dict[str, dict[str, float]]:
    found = {}
    for name, argv in (("plain", ()), ("distributed", ("--use-distributed-optimizer",))):
        directory = world.folder / f"elastic_{name}"
        with world.trainer(*argv) as trainer:
            train(trainer, range(3), TWO_RANKS)
            trainer.save(directory, 3)
            uninterrupted, weights = train(trainer, range(3, 6), TWO_RANKS), weights_of(trainer)
        if world.rank != 0:
            world.started += 1
            continue
        with world.trainer(*argv, size=1, load=False) as trainer:
            trainer.load(directory, 3)
            resumed = train(trainer, range(3, 6), ONE_RANK)
            found[name] = {
                "metrics": metric_difference(uninterrupted, resumed),
                "weights": largest_difference(weights, weights_of(trainer)),
            }
    return found


OBJECTIVES = {
    "whitened": ObjectiveConfig(
        estimator=Estimator.REINFORCE_PLUS_PLUS,
        policy=PolicyLossSettings(PolicyObjective.REINFORCE),
        normalize_advantages=True,
        gamma=0.9,
        calculate_per_token_loss=True,
        weight_rule=WeightRule(WeightKind.TIS, 0.5, 2.0),
    ),
    "sequence_ratio": ObjectiveConfig(
        estimator=Estimator.GSPO, use_rollout_logprobs=False, opsm_delta=1e-4, entropy_coef=0.01
    ),
    "own_weighting": ObjectiveConfig(
        estimator=Estimator.CISPO, policy=PolicyLossSettings(PolicyObjective.CISPO, 1.0), weighting=weigh_by_position
    ),
}


def prepared_steps(
    trainer: MegatronTrainer, split: Sequence[Sequence[Sequence[int]]]
) -> tuple[list[dict[str, float]], dict[str, int]]:
    """A rollout batch of three lazy steps, prepared as a whole; its metrics, and how it was read."""
    batches = [make_sequences(seed) for seed in range(3)]
    mine = [
        WatchedBatches([pack(sequences, members) for members in split[trainer.data_parallel_rank]])
        for sequences in batches
    ]
    steps = trainer.prepare(mine)
    reads = {
        "prepare": sum(step.num_reads for step in mine),
        "prepare_narrow": sum(step.num_narrow_reads for step in mine),
    }
    metrics = [trainer.train_step(step, totals(sequences)) for step, sequences in zip(steps, batches, strict=True)]
    reads["train"] = sum(step.num_reads for step in mine) - reads["prepare"]
    return metrics, {**reads, "most_held": max(step.most_held for step in mine)}


def objectives(world: World) -> dict[str, dict[str, Any]]:
    """Each objective on two ranks and on one."""
    found: dict[str, dict[str, Any]] = {}
    for name, config in OBJECTIVES.items():
        with world.trainer(objective=config) as trainer:
            (metrics, reads), weights = prepared_steps(trainer, TWO_RANKS), weights_of(trainer)
        if world.rank != 0:
            world.started += 1
            continue
        with world.trainer(objective=config, size=1) as trainer:
            (single_metrics, _), single_weights = prepared_steps(trainer, ONE_RANK), weights_of(trainer)
        found[name] = {
            "weights": largest_difference(weights, single_weights),
            "metrics": metric_difference(metrics, single_metrics),
            "moved": largest_difference(weights, load_file(world.checkpoint("tied") / "model.safetensors")),
            "reported": metrics,
            "reads": reads,
        }
    return found


def recorded_step(trainer: MegatronTrainer, kind: str, split: Sequence[Sequence[Sequence[int]]]) -> dict[str, float]:
    """One step on batches with candidates or nuclei."""
    sequences = make_sequences(5)
    mine = [pack_recorded(kind, sequences, members) for members in split[trainer.data_parallel_rank]]
    return trainer.train_step(mine, totals(sequences))


def centered_top_k(world: World) -> dict[str, dict[str, Any]]:
    return centered_scores(world, "top_k")


def centered_nucleus(world: World) -> dict[str, dict[str, Any]]:
    return centered_scores(world, "nucleus")


def centered_scores(world: World, kind: str) -> dict[str, dict[str, Any]]:
    """Score centering on two ranks, by data and by tensor, and on one."""
    objective = ObjectiveConfig(
        policy=PolicyLossSettings(PolicyObjective.REINFORCE),
        weight_rule=WeightRule(WeightKind.TIS, 0.0, 2.0),
        centers_scores=True,
    )
    descent = ("--optimizer", "sgd", "--sgd-momentum", "0")
    options: dict[str, Any] = {"objective": objective, "lr": 0.1, "temperature": 0.8}
    reached = []
    for argv, split in [((), TWO_RANKS), (("--tensor-model-parallel-size", "2"), ONE_RANK)]:
        with world.trainer(*descent, *argv, **options) as trainer:
            reached.append((recorded_step(trainer, kind, split), weights_of(trainer)))
    if world.rank != 0:
        return {}
    with world.trainer(*descent, size=1, **options) as trainer:
        metrics, weights = recorded_step(trainer, kind, ONE_RANK), weights_of(trainer)
    return {
        name: {
            "weights": largest_difference(weights, other_weights),
            "metrics": metric_difference([metrics], [other_metrics]),
            "moved": largest_difference(weights, load_file(world.checkpoint("tied") / "model.safetensors")),
            "reported": metrics,
        }
        for name, (other_metrics, other_weights) in zip(("data", "tensor"), reached, strict=True)
    }


def replayed_nuclei(world: World) -> dict[str, Any]:
    """Log-probabilities with and without the nucleus, and what is said where centering has nothing to sum over."""
    sequences, said = make_sequences(5), {}
    packed = pack_recorded("nucleus", sequences, range(8))
    assert packed.nucleus is not None
    objective = ObjectiveConfig(policy=PolicyLossSettings(PolicyObjective.REINFORCE), centers_scores=True)
    first = int(np.flatnonzero(packed.loss_mask)[0])
    others = packed.nucleus.ids.copy()
    others[packed.nucleus.offsets[first] : packed.nucleus.offsets[first + 1]] = 60
    broken = {
        "absent": replace(packed, nucleus=None),
        "without_token": replace(packed, nucleus=replace(packed.nucleus, ids=others)),
    }
    with world.trainer(objective=objective) as trainer:
        (replayed,) = trainer.log_probs([packed])
        (whole,) = trainer.log_probs([packed], replay_nucleus=False)
        for name, batch in broken.items():
            try:
                trainer.train_step([batch], totals(sequences))
            except VimeError as error:
                said[name] = f"{type(error).__name__}: {error}"
    unrecorded = np.diff(packed.nucleus.offsets) == 0
    return {
        "kept": float(np.abs(replayed - whole)[unrecorded].max(initial=0)),
        "unrecorded": int(unrecorded.sum()),
        "higher": bool((replayed >= whole - 1e-6).all()),
        "raised": float((replayed - whole).max()),
        "said": said,
    }


def unequal_microbatches(world: World) -> dict[str, str]:
    said = ""
    with world.trainer() as trainer:
        sequences = make_sequences(0)
        mine: list[PackedMicrobatch] = [pack(sequences, [0]), pack(sequences, [1])][: 2 - world.rank]
        try:
            trainer.train_step(mine, totals(sequences))
        except VimeError as error:
            said = f"{type(error).__name__}: {error}"
    return {"said": said}


def bad_sample_on_other_rank(world: World) -> dict[str, str]:
    said = ""
    with world.trainer() as trainer:
        sequences = make_sequences(0)
        mine = [pack(sequences, members) for members in TWO_RANKS[world.rank]]
        if world.rank == 1:
            mine[1].advantages[0] = np.inf
        try:
            trainer.train_step(mine, totals(sequences))
        except VimeError as error:
            said = f"{type(error).__name__}: {error}"
    return {"said": said}


def model_parallel(world: World) -> dict[str, dict[str, float]]:
    """With plain gradient descent: Adam would turn the rounding of near-zero gradients into whole steps."""
    descent = ("--optimizer", "sgd", "--sgd-momentum", "0")
    tensor = (*descent, "--tensor-model-parallel-size", "2")
    return {
        "tensor": compare_with_one_rank(world, *tensor, split=ONE_RANK, lr=0.1),
        "sequence": compare_with_one_rank(world, *tensor, "--sequence-parallel", split=ONE_RANK, lr=0.1),
        "recompute": compare_with_one_rank(
            world,
            *tensor,
            *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
            split=ONE_RANK,
            lr=0.1,
        ),
        "pipeline": compare_with_one_rank(
            world, *descent, "--pipeline-model-parallel-size", "2", split=ONE_RANK, lr=0.1
        ),
    }


SCENARIOS = {
    function.__name__: function
    for function in (
        logits_match_hugging_face,
        gradients_match_dense_reference,
        weights_round_trip,
        resume_and_replay,
        background_save,
        weights_only_load,
        refusals,
        planted_faults,
        data_parallel,
        objectives,
        centered_top_k,
        centered_nucleus,
        replayed_nuclei,
        resume_on_fewer_ranks,
        unequal_microbatches,
        bad_sample_on_other_rank,
        model_parallel,
    )
}


def main(scenarios: dict[str, Callable[[World], Any]]) -> None:
    folder, rank, size, *names = sys.argv[1:]
    world = World(Path(folder), int(rank), int(size))
    for name in names:
        found = scenarios[name](world)
        if world.rank == 0:
            (world.folder / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(SCENARIOS)
