"""One rank of a world whose trainer has a reference model and a teacher; see `megatron_worker`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core.utils import unwrap_model

from tests.reference.dense_objective import Options
from tests.support.watched_batches import WatchedBatches
from tests.vime.backends.megatron_utils.megatron_worker import (
    MODELS,
    ONE_RANK,
    World,
    largest_difference,
    main,
    metric_difference,
    weights_of,
)
from tests.vime.backends.megatron_utils.tiny_batches import make_sequences, totals
from tests.vime.backends.megatron_utils.tiny_recorded import pack_recorded, with_routes
from vime.algorithms.kl import KlKind
from vime.algorithms.objective_config import Estimator, LossKind, ObjectiveConfig
from vime.algorithms.policy_loss import PolicyLossSettings
from vime.backends.megatron_utils.frozen_weights import FrozenWeights
from vime.backends.megatron_utils.trainer import MegatronTrainer
from vime.backends.megatron_utils.weight_source import WeightSource
from vime.data.batch import PackedMicrobatch
from vime.errors import VimeError

DESCENT = ("--optimizer", "sgd", "--sgd-momentum", "0")
KL_LOSS = ObjectiveConfig(use_kl_loss=True, kl_loss_coef=0.2, kl_kind=KlKind.K3)
ALL = ObjectiveConfig(
    estimator=Estimator.REINFORCE_PLUS_PLUS,
    use_rollout_logprobs=False,
    kl_coef=0.3,
    kl_kind=KlKind.K2,
    gamma=0.9,
    opd_kl_coef=0.5,
    normalize_advantages=True,
    scores_entropy=True,
)


def sources(world: World, model: str = "tied", **more: Any) -> dict[str, Any]:
    """A reference and a teacher that differ from the actor and from each other."""
    options = MODELS[model]
    return {
        "hf_checkpoint": world.checkpoint(model, seed=3, **options),
        "reference": WeightSource("--ref-load", world.checkpoint(f"{model}_reference", seed=5, **options)),
        "teacher": WeightSource("--opd-teacher-load", world.checkpoint(f"{model}_teacher", seed=9, **options)),
        **more,
    }


@contextmanager
def begun(world: World, *argv: str, from_hf: bool = True, **options: Any) -> Any:
    """A trainer of a new run; its actor starts at the Hugging Face checkpoint, which the reference isn't."""
    with world.trainer(*argv, load=False, **options) as trainer:
        trainer.load_start()
        if from_hf:
            trainer.load_hf()
        yield trainer


def packs(seed: int, split: Sequence[Sequence[int]] = ONE_RANK[0], kind: str = "top_k") -> list[PackedMicrobatch]:
    sequences = make_sequences(seed)
    return [pack_recorded(kind, sequences, members) for members in split]


def random_state() -> list[Any]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = {name: state.tolist() for name, state in get_cuda_rng_tracker().get_states().items()}
    numpy_state = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist(), numpy_state[2], tracker]


# --- one rank ---------------------------------------------------------------------------------------------------------


def steps_match_dense_reference(world: World) -> dict[str, dict[str, float]]:
    """A prepared step with frozen models, by plain descent at rate 1, against three float64 models."""
    from tests.vime.backends.megatron_utils.dense_reference import load_double
    from tests.vime.backends.megatron_utils.frozen_reference import Shaping, frozen_step

    policy = PolicyLossSettings(eps_clip=0.1)
    base = Options(eps=0.1)
    cases = {
        "kl_in_loss": (replace(KL_LOSS, use_unbiased_kl=True), replace(base, old_is_sampler=True, kl_kind="k3",
                       kl_coef=0.2, unbiased=True), Shaping()),
        "kl_in_reward": (
            replace(ALL, opd_kl_coef=None, use_rollout_logprobs=True),
            replace(base, old_is_sampler=True, reward_kl="k2"),
            Shaping(returns=True, kl_coef=0.3, kl_kind="k2", gamma=0.9, whiten=True),
        ),
        "distilled": (
            ObjectiveConfig(opd_kl_coef=0.5, use_rollout_logprobs=False, calculate_per_token_loss=True),
            replace(base, opd=True, per_token=True),
            Shaping(opd_kl_coef=0.5),
        ),
        "all": (
            ALL,
            replace(base, opd=True, reward_kl="k2"),
            Shaping(returns=True, kl_coef=0.3, kl_kind="k2", gamma=0.9, opd_kl_coef=0.5, whiten=True),
        ),
    }  # fmt: skip
    found = {}
    sequences = make_sequences(1)
    for name, (objective, options, shaping) in cases.items():
        frozen = sources(world)
        given = {"temperature": 0.7, "lr": 1.0, "clip_grad": 0.0, "objective": replace(objective, policy=policy)}
        if objective.opd_kl_coef is None:
            given["teacher"] = None
        with begun(world, *DESCENT, **{**frozen, **given}) as trainer:
            before = weights_of(trainer)
            (step,) = trainer.prepare([packs(1)])
            metrics = trainer.train_step(step, totals(sequences))
            after = weights_of(trainer)
        model = load_double(frozen["hf_checkpoint"])
        paths = (frozen["reference"].directory, frozen["teacher"].directory)
        expected = frozen_step(model, *paths, sequences, options, shaping, 0.7)
        gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
        moved = {key: before[key].double() - after[key].double() for key in before}
        found[name] = {
            "metrics": max(abs(metrics[key] - value) for key, value in expected.items()),
            "gradients": max(float((moved[key] - gradients[key]).abs().max()) for key in moved),
            "largest_gradient": max(float(gradients[key].abs().max()) for key in moved),
            **{key: metrics.get(key, 0.0) for key in ("kl_loss", "reward_kl", "opd_reverse_kl")},
        }
    return found


def passes_leave_the_actor_alone(world: World) -> dict[str, dict[str, Any]]:
    """Weights, optimizer's copies and random state around a preparation, and how it reads."""
    found = {}
    for name, argv, more in (
        ("fp32", (), {}),
        ("bf16", (), {"precision": "bf16"}),
        ("bf16_distributed", ("--use-distributed-optimizer",), {"precision": "bf16"}),
    ):
        with begun(world, *argv, objective=ALL, **sources(world, **more)) as trainer:
            trainer.train_step(trainer.prepare([packs(0)])[0], totals(make_sequences(0)))
            weights, state = weights_of(trainer), random_state()
            lazy = WatchedBatches(packs(1))
            (step,) = trainer.prepare([lazy])
            reads = (lazy.num_reads, lazy.num_narrow_reads)
            found[name] = {
                "weights": largest_difference(weights, weights_of(trainer)),
                "random_state": state == random_state(),
                "reads": reads,
                "apart": float(np.abs(step[0].reference_log_probs - step[0].teacher_log_probs).max()),
            }
    return found


def expert_bias_is_exchanged(world: World) -> dict[str, list[float]]:
    """A buffer that counts in the forward pass and is saved: the bias of a router's experts."""
    argv = ("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias")
    checkpoint = world.checkpoint("experts", seed=3, **MODELS["experts"])
    with world.trainer(*argv, hf_checkpoint=checkpoint) as trainer:
        chunks = trainer._learner.chunks
        bias = next(value for name, value in unwrap_model(chunks[0]).named_buffers() if name.endswith("expert_bias"))
        bias.fill_(0.25)
        frozen = FrozenWeights(chunks)
        bias.fill_(0.5)
        with frozen.in_place():
            inside = bias.tolist()
        after = bias.tolist()
    return {"inside": inside, "after": after}


def reference_follows_over_a_resume(world: World) -> dict[str, Any]:
    """Rollouts 0 to 4 with an update after each second one, and the same resumed after rollouts 0 and 2."""
    options = {**sources(world), "teacher": None, "objective": KL_LOSS, "reference_update_interval": 2, "lr": 1e-2}

    def rollouts(trainer: MegatronTrainer, first: int, directory: Any = None) -> list[dict[str, float]]:
        metrics = []
        for rollout_id in range(first, 5):
            (step,) = trainer.prepare([packs(rollout_id)])
            metrics.append(trainer.train_step(step, totals(make_sequences(rollout_id))))
            trainer.rollout_trained(rollout_id)
            if directory is not None:
                trainer.save(directory, rollout_id)
        return metrics

    directory = world.folder / "followed"
    with begun(world, **options) as trainer:
        whole = rollouts(trainer, 0, directory)
    resumed = {}
    for after in (0, 2):
        with world.trainer(load=False, **options) as trainer:
            trainer.load(directory, after)
            resumed[after] = metric_difference(whole[after + 1 :], rollouts(trainer, after + 1))
    with begun(world, **{**options, "reference_update_interval": None}) as trainer:
        still = rollouts(trainer, 0)
    return {
        "resumed": list(resumed.values()),
        "saved": [(directory / f"iter_{number:07d}" / "reference").is_dir() for number in range(5)],
        "kl": [step["kl_loss"] for step in whole],
        "still": [step["kl_loss"] for step in still],
    }


def sources_of_frozen_weights(world: World) -> dict[str, Any]:
    """A Megatron checkpoint gives what the Hugging Face files gave that it was made of; the actor starts there."""
    options = sources(world)
    directory = world.folder / "megatron_reference"
    with world.trainer(hf_checkpoint=options["reference"].directory) as trainer:
        trainer.save(directory, 7, write_tracker=True)
        expected = weights_of(trainer)
    scored, starts = {}, {}
    for name, source in {
        "hugging_face": options["reference"],
        "newest": WeightSource("--ref-load", directory),
        "numbered": WeightSource("--ref-load", directory, 7),
    }.items():
        with begun(world, from_hf=False, **{**options, "objective": KL_LOSS, "reference": source}) as trainer:
            starts[name] = largest_difference(expected, weights_of(trainer))
            trainer.load_hf()
            scored[name] = trainer.prepare([packs(0)])[0][0].reference_log_probs
    said = {}
    for name, source in {
        "step_of_hf": replace(options["reference"], iteration=7),
        "absent": WeightSource("--ref-load", directory, 8),
        "other_shape": WeightSource("--ref-load", world.checkpoint("other", seed=1, **MODELS["deep"])),
    }.items():
        said[name] = ""
        try:
            with begun(world, **{**options, "objective": KL_LOSS, "reference": source}):
                pass
        except VimeError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return {
        "starts": starts,
        "scored": {name: float(np.abs(each - scored["hugging_face"]).max()) for name, each in scored.items()},
        "said": said,
    }


def wider_passes(world: World) -> dict[str, Any]:
    """Passes over neighbouring microbatches together, and over each alone."""
    found: dict[str, Any] = {"sizes": [], "scores": [], "entropies": []}
    kept = []
    for most in (None, 90):
        with begun(world, objective=ALL, **sources(world, log_probs_max_tokens=most)) as trainer:
            scores = trainer._forward.scores

            def counted(source: Any, scores: Any = scores, **options: Any) -> Any:
                found["sizes"].append([each.num_tokens for each in source])
                return scores(source, **options)

            trainer._forward.scores = counted
            (step,) = trainer.prepare([packs(0, [[0, 1], [2], [4], [6, 7]], "nucleus")])
            kept.append([(b.reference_log_probs, b.teacher_log_probs, b.old_log_probs, b.old_entropies) for b in step])
            metrics = trainer.train_step(step, totals(make_sequences(0)))
            found["entropies"].append(abs(metrics["rollout_entropy"] - metrics["entropy_loss"]))
    pairs = [pair for one, other in zip(*kept, strict=True) for pair in zip(one, other, strict=True)]
    found["scores"] = max(float(np.abs(one - other).max()) for one, other in pairs)
    found["entropy"] = metrics["rollout_entropy"]
    return found


def what_each_pass_replays(world: World) -> dict[str, dict[str, float]]:
    """Prepared scores against a trainer of each model's own, with and without recorded nuclei and experts."""
    options = sources(world, "experts")
    members = range(8)
    batch = with_routes(pack_recorded("nucleus", make_sequences(0), members), absent=[103])
    with begun(world, objective=ALL, replay_routes=True, **options) as trainer:
        ((prepared,),) = trainer.prepare([[batch]])
    found = {}
    for field, checkpoint in {
        "reference_log_probs": options["reference"].directory,
        "teacher_log_probs": options["teacher"].directory,
        "old_log_probs": options["hf_checkpoint"],
    }.items():
        with world.trainer(hf_checkpoint=checkpoint, replay_routes=True) as trainer:
            for nucleus in (False, True):
                for routes in (False, True):
                    (expected,) = trainer.log_probs([batch], replay_nucleus=nucleus, replay_routes=routes)
                    name = f"{field} nucleus={nucleus} routes={routes}"
                    found[name] = float(np.abs(getattr(prepared, field) - expected).max())
    return found


def records_match_dense_reference(world: World) -> dict[str, dict[str, float]]:
    """A step of supervised fine-tuning by plain descent at rate 1, against a float64 model."""
    from tests.reference.dense_losses import supervised
    from tests.vime.backends.megatron_utils.dense_reference import load_double
    from tests.vime.backends.megatron_utils.frozen_reference import scored

    found = {}
    sequences = make_sequences(1)
    for per_token in (False, True):
        objective = ObjectiveConfig(
            loss_kind=LossKind.SUPERVISED, calculate_per_token_loss=per_token, recomputes_loss=per_token
        )
        with world.trainer(*DESCENT, objective=objective, lr=1.0, clip_grad=0.0) as trainer:
            before = weights_of(trainer)
            (step,) = trainer.prepare([packs(1)])
            metrics = trainer.train_step(step, totals(sequences))
            after = weights_of(trainer)
        model = load_double(world.checkpoint("tied"))
        pairs = [scored(model, item, 1.0) for item in sequences]
        records = [
            SimpleNamespace(
                rollout=item.rollout, mask=item.loss_mask, length=item.response_length, entropies=entropies.tolist()
            )
            for item, (_, entropies) in zip(sequences, pairs, strict=True)
        ]
        loss, expected = supervised(records, [list(log_probs) for log_probs, _ in pairs], per_token=per_token)
        loss.backward()
        gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
        moved = {key: before[key].double() - after[key].double() for key in before}
        found["per_token" if per_token else "per_rollout"] = {
            "metrics": max(abs(metrics[key] - value) for key, value in expected.items()),
            "gradients": max(float((moved[key] - gradients[key]).abs().max()) for key in moved),
            "largest_gradient": max(float(gradients[key].abs().max()) for key in moved),
        }
    return found


# --- layouts ----------------------------------------------------------------------------------------------------------

TENSOR = ("--tensor-model-parallel-size", "2")
PIPELINE = ("--pipeline-model-parallel-size", "2")


@dataclass(frozen=True)
class Layout:
    argv: tuple[str, ...]
    model: str = "tied"


LAYOUTS = {
    "tensor": Layout(TENSOR),
    "sequence": Layout((*TENSOR, "--sequence-parallel")),
    "pipeline": Layout(PIPELINE, "untied"),
    "tied_pipeline": Layout(PIPELINE),
    "virtual": Layout((*PIPELINE, "--num-layers-per-virtual-pipeline-stage", "1"), "deep"),
    "context": Layout(("--context-parallel-size", "2")),
    "experts": Layout(("--expert-model-parallel-size", "2"), "experts"),
    "distributed": Layout(("--use-distributed-optimizer", "--overlap-param-gather", "--overlap-grad-reduce")),
}


def layouts(world: World) -> dict[str, dict[str, float]]:
    """Reference and teacher of every layout score as those of one rank, also after the reference has followed."""
    found = {}
    for name, layout in LAYOUTS.items():
        found[name] = compare(world, layout)
    return found


def compare(world: World, layout: Layout) -> dict[str, float]:
    options = {"objective": ALL, "reference_update_interval": 1, "lr": 1e-2, **sources(world, layout.model)}
    options["adam_eps"] = 1.0

    def run(trainer: MegatronTrainer) -> tuple[list[Any], dict[str, float]]:
        """Scores at the start and after the reference has followed, every rank on all sequences; a step between."""
        size = trainer.data_parallel_size
        before = weights_of(trainer)
        (first,) = trainer.prepare([packs(0)])
        moved = largest_difference(before, weights_of(trainer))
        share = [ONE_RANK[0], [ONE_RANK[0][0], ONE_RANK[0][2]], [ONE_RANK[0][1], ONE_RANK[0][3]]]
        mine = share[0] if size == 1 else share[1 + trainer.data_parallel_rank]
        (step,) = trainer.prepare([packs(1, mine)])
        metrics = trainer.train_step(step, totals(make_sequences(1)))
        trainer.rollout_trained(0)
        (second,) = trainer.prepare([packs(0)])
        scores = [(batch.reference_log_probs, batch.teacher_log_probs) for batch in (*first, *second)]
        return scores, {"moved": moved, **metrics}

    with begun(world, *layout.argv, **options) as trainer:
        scores, metrics = run(trainer)
        directory = world.folder / f"layout_{world.started}"
        trainer.save(directory, 0)
    if world.rank != 0:
        world.started += 1
        return {}
    with world.trainer(size=1, load=False, **options) as trainer:
        trainer.load_start()
        trainer.load_hf()
        alone, alone_metrics = run(trainer)
        trainer._frozen.load(directory / "iter_0000000")
        (again,) = trainer.prepare([packs(0)])
    saved = [batch.reference_log_probs for batch in again]
    pairs = [pair for one, other in zip(scores, alone, strict=True) for pair in zip(one, other, strict=True)]
    return {
        "scores": max(float(np.abs(one - other).max()) for one, other in pairs),
        "saved": max(float(np.abs(one - each[0]).max()) for one, each in zip(saved, alone[len(saved) :], strict=True)),
        "followed": max(float(np.abs(one[0] - two[0]).max()) for one, two in zip(alone[:4], alone[4:], strict=True)),
        "actor": metrics.pop("moved"),
        "metrics": metric_difference([metrics], [alone_metrics]),
    }


SCENARIOS: dict[str, Callable[[World], Any]] = {
    function.__name__: function
    for function in (
        steps_match_dense_reference,
        passes_leave_the_actor_alone,
        expert_bias_is_exchanged,
        reference_follows_over_a_resume,
        sources_of_frozen_weights,
        wider_passes,
        what_each_pass_replays,
        records_match_dense_reference,
        layouts,
    )
}

if __name__ == "__main__":
    main(SCENARIOS)
