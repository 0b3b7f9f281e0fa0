"""One rank of a world whose trainers have uncommon settings: frozen parameters, other optimizers, hooks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.vime.backends.megatron_utils.critic_worker import PPO, critic_weights, learn, pair
from tests.vime.backends.megatron_utils.megatron_worker import (
    MODELS,
    ONE_RANK,
    RECOMPUTE,
    Weights,
    World,
    largest_difference,
    main,
    metric_difference,
    train,
    weights_of,
)
from tests.vime.backends.megatron_utils.tiny_batches import make_sequences, pack, totals
from vime.algorithms.objective_config import Estimator, ObjectiveConfig
from vime.backends.megatron_utils.trainer_hooks import Hook, StepPlace, TrainerHooks
from vime.errors import VimeError

UPPER = ("layers\\.1\\.", "final_layernorm")
"""In the model of two layers: what stays when the lower one and the embedding are frozen."""


def moved(before: Weights, after: Weights) -> list[str]:
    return sorted(name for name in before if not torch.equal(before[name], after[name]))


def said_by(action: Callable[[], object]) -> str:
    try:
        action()
    except VimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def frozen_parameters(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    variants: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "only": ((), {"only_train_params": UPPER}),
        "frozen": ((), {"freeze_params": ("embedding", "layers\\.0\\.")}),
        "recomputed": (RECOMPUTE, {"only_train_params": UPPER}),
        "distributed": (("--use-distributed-optimizer",), {"only_train_params": UPPER}),
    }
    checkpoint = world.checkpoint("untied", seed=3, **MODELS["untied"])
    for name, (argv, options) in variants.items():
        if name == "frozen":
            options = {"freeze_params": (*options["freeze_params"], "output_layer")}
        directory = world.folder / f"frozen_{name}"
        with world.trainer(*argv, hf_checkpoint=checkpoint, **options) as trainer:
            before = weights_of(trainer)
            first = train(trainer, [0], ONE_RANK)
            trainer.save(directory, 1)
            further = train(trainer, [1], ONE_RANK)
            after = weights_of(trainer)
        with world.trainer(*argv, hf_checkpoint=checkpoint, load=False, **options) as trainer:
            trainer.load(directory, 1)
            resumed = train(trainer, [1], ONE_RANK)
            found[name] = {
                "moved": moved(before, after),
                "resumed": metric_difference(further, resumed),
                "weights": largest_difference(after, weights_of(trainer)),
                "grad_norm": first[0]["grad_norm"],
            }
    refused = {"unmatched": ("layers\\.7\\.",), "nothing_left": ("",)}
    for name, patterns in refused.items():
        with_them = {"hf_checkpoint": checkpoint, "freeze_params": patterns}
        found[name] = said_by(lambda options=with_them: enter(world, options))
    with pair(world, only_train_params=("layers\\.1\\.",)) as both:
        start = critic_weights(both.critic)
        learn(both, [0])
        found["critic"] = moved(start, critic_weights(both.critic))
    return found


def enter(world: World, options: dict[str, Any]) -> None:
    with world.trainer(load=False, **options):
        pass


def frozen_stage(world: World) -> dict[str, Any]:
    """Nothing of the first pipeline stage is trained."""
    checkpoint = world.checkpoint("untied", seed=3, **MODELS["untied"])
    options: dict[str, Any] = {"hf_checkpoint": checkpoint, "only_train_params": UPPER, "lr": 0.5, "adam_eps": 1.0}
    directory = world.folder / "frozen_stage"
    argv = ("--pipeline-model-parallel-size", "2")
    with world.trainer(*argv, **options) as trainer:
        metrics = train(trainer, [0], ONE_RANK)
        trainer.save(directory, 1)
        metrics += train(trainer, [1], ONE_RANK)
        weights = weights_of(trainer)
    with world.trainer(*argv, load=False, **options) as trainer:
        trainer.load(directory, 1)
        resumed = train(trainer, [1], ONE_RANK)
    if world.rank != 0:
        world.started += 1
        return {}
    with world.trainer(size=1, **options) as trainer:
        before = weights_of(trainer)
        alone = train(trainer, [0, 1], ONE_RANK)
        return {
            "metrics": metric_difference(metrics, alone),
            "weights": largest_difference(weights, weights_of(trainer)),
            "resumed": metric_difference(metrics[1:], resumed),
            "moved": moved(before, weights),
        }


def forgetful_optimizers(world: World) -> dict[str, Any]:
    """Adam that keeps nothing, and Adam that is cleared after each batch of one step."""
    found: dict[str, Any] = {}
    # A small epsilon would turn the rounding of gradients near zero into whole steps.
    decayed: dict[str, Any] = {"weight_decay": 0.1, "adam_eps": 0.01}
    for name, argv in (("plain", ()), ("distributed", ("--use-distributed-optimizer",))):
        directory = world.folder / f"stateless_{name}"
        with world.trainer(*argv, stateless_adam=True, **decayed) as trainer:
            stateless = train(trainer, [0, 1], ONE_RANK)
            folder = trainer.save(directory, 2)
            stateless += train(trainer, [2], ONE_RANK)
            weights = weights_of(trainer)
            kept = sum(len(part.optimizer.state) for part in trainer._learner.sub_optimizers())
        with world.trainer(*argv, stateless_adam=True, load=False, **decayed) as trainer:
            trainer.load(directory, 2)
            resumed = train(trainer, [2], ONE_RANK)
            again = largest_difference(weights, weights_of(trainer))
        cleared = []
        with world.trainer(*argv, reset_optimizer_states=True, **decayed) as trainer:
            for seed in range(3):
                cleared += train(trainer, [seed], ONE_RANK)
                trainer.rollout_trained(seed)
            whole = trainer.save(world.folder / f"cleared_{name}", 3)
            apart = largest_difference(weights, weights_of(trainer))
        with world.trainer(*argv, **decayed) as trainer:
            train(trainer, range(3), ONE_RANK)
            ordinary = largest_difference(weights, weights_of(trainer))
        found[name] = {
            "kept": kept,
            "resumed": metric_difference(stateless[2:], resumed),
            "again": again,
            "apart": apart,
            "ordinary": ordinary,
            "bytes": size_of(folder) / size_of(whole),
        }
    return found


def unsaved_optimizer(world: World) -> dict[str, Any]:
    """A checkpoint without the optimizer's state, resumed by a trainer that saves none and by one that wants it."""
    found: dict[str, Any] = {}
    for name, argv in (("plain", ()), ("distributed", ("--use-distributed-optimizer",))):
        bare, whole = world.folder / f"bare_{name}", world.folder / f"whole_{name}"
        with world.trainer(*argv, saves_optimizer=False) as trainer:
            train(trainer, [0, 1], ONE_RANK)
            folder, weights = trainer.save(bare, 2), weights_of(trainer)
        with world.trainer(*argv) as trainer:
            train(trainer, [0, 1], ONE_RANK)
            size = size_of(trainer.save(whole, 2))
            kept = train(trainer, [2], ONE_RANK)
        with world.trainer(*argv, saves_optimizer=False, load=False) as trainer:
            trainer.load(bare, 2)
            resumed = largest_difference(weights, weights_of(trainer))
            anew, anew_weights = train(trainer, [2], ONE_RANK), weights_of(trainer)
        with world.trainer(*argv, saves_optimizer=False, load=False) as trainer:
            trainer.load(whole, 2)
            from_whole, whole_weights = train(trainer, [2], ONE_RANK), weights_of(trainer)
        with world.trainer(*argv, load=False) as trainer:
            said = said_by(partial(trainer.load, bare, 2))
        found[name] = {
            "bytes": size_of(folder) / size,
            "resumed": resumed,
            "step": metric_difference(anew, from_whole),
            "kept": metric_difference(kept, from_whole),
            "apart": largest_difference(anew_weights, whole_weights),
            "said": said,
        }
    return found


def renamed_model(world: World) -> dict[str, Any]:
    """A checkpoint whose config names a type that nobody knows, trained as the family that it is of."""
    plain, renamed = world.checkpoint("tied"), world.folder / "renamed"
    shutil.copytree(plain, renamed)
    config = json.loads((renamed / "config.json").read_text())
    (renamed / "config.json").write_text(json.dumps({**config, "model_type": "house_model"}))
    with world.trainer() as trainer:
        metrics, weights = train(trainer, [0], ONE_RANK), weights_of(trainer)
    with world.trainer(hf_checkpoint=renamed, model_name="Qwen3ForCausalLM") as trainer:
        named = train(trainer, [0], ONE_RANK)
        apart = largest_difference(weights, weights_of(trainer))
    return {
        "metrics": metric_difference(metrics, named),
        "weights": apart,
        "said": said_by(partial(enter, world, {"hf_checkpoint": renamed})),
    }


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def padded_vocabulary(world: World) -> dict[str, Any]:
    with world.trainer() as trainer:
        plain, weights = train(trainer, range(2), ONE_RANK), weights_of(trainer)
    with world.trainer(padded_vocab_size=64) as trainer:
        padded = train(trainer, range(2), ONE_RANK)
        rows = trainer._args.padded_vocab_size
        found = largest_difference(weights, weights_of(trainer))
    return {
        "metrics": metric_difference(plain, padded),
        "weights": found,
        "rows": rows,
        "said": said_by(lambda: enter(world, {"padded_vocab_size": 49})),
    }


def role_overrides(world: World) -> dict[str, Any]:
    """Megatron's arguments by attribute name, set over all flags."""
    with world.trainer("--weight-decay", "0.5", megatron_overrides={"lr": "2e-3", "weight_decay": 0.25}) as trainer:
        group = trainer._learner.optimizer.param_groups[0]
        found = {"lr": group["max_lr"], "weight_decay": trainer._learner.scheduler.end_wd}
    return {**found, "said": said_by(lambda: enter(world, {"megatron_overrides": {"min_lr": "low"}}))}


def hooks(world: World) -> dict[str, Any]:
    from megatron.training import get_args

    from vime.backends.megatron_utils import model
    from vime.backends.megatron_utils.model import PackedGPTModel, build_core_config

    class OwnModel(PackedGPTModel):
        """A user's own."""

    called: list[Any] = []

    def provide(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> torch.nn.Module:
        args = get_args()
        called.append(["provide", pre_process, post_process, vp_stage])
        config = build_core_config(args, replay_routes=False)
        return OwnModel(
            config, model._block_spec(config, vp_stage, groups_experts=False), vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings, pre_process=pre_process, post_process=post_process,
            share_embeddings_and_output_weights=True, position_embedding_type="rope", rotary_base=args.rotary_base,
        )  # fmt: skip

    def step(args: Any, rollout_id: int, step_id: int, chunks: Any, optimizer: Any, scheduler: Any) -> None:
        gradients = sum(float(chunk.buffers[0].grad_data.abs().sum()) for chunk in chunks)
        called.append(["step", args.padded_vocab_size, rollout_id, step_id, gradients, hasattr(optimizer, "step")])
        assert scheduler is not None

    def fail(*_: Any) -> None:
        raise KeyError("knob")

    own = TrainerHooks(
        model_provider=Hook("--custom-model-provider-path", "own.provide", provide),
        init=Hook("--custom-megatron-init-path", "own.init", lambda args: called.append(["init", args.hidden_size])),
        before_log_prob=Hook(
            "--custom-megatron-before-log-prob-hook-path", "own.log",
            lambda _, chunks, prefix: called.append(["log_prob", len(chunks), prefix]),
        ),
        before_train_step=Hook("--custom-megatron-before-train-step-hook-path", "own.step", step),
    )  # fmt: skip
    objective = ObjectiveConfig(estimator=Estimator.GSPO, use_rollout_logprobs=False)
    sequences = make_sequences(0)
    batch = [pack(sequences, members) for members in ONE_RANK[0]]
    with world.trainer(objective=objective) as trainer:
        (prepared,) = trainer.prepare([batch])
        plain = [trainer.train_step(prepared, totals(sequences)) for _ in range(2)]
    with world.trainer(objective=objective, hooks=own) as trainer:
        (prepared,) = trainer.prepare([batch])
        hooked = [trainer.train_step(prepared, totals(sequences), StepPlace(5, number)) for number in range(2)]
    found = {"called": list(called), "metrics": metric_difference(plain, hooked)}
    broken = replace(own, model_provider=None, before_train_step=replace(own.before_train_step, function=fail))
    with world.trainer(objective=objective, hooks=broken) as trainer:
        before = weights_of(trainer)
        found["said"] = said_by(lambda: trainer.train_step(batch, totals(sequences)))
        found["kept"] = largest_difference(before, weights_of(trainer))
    called.clear()
    with pair(world, hooks=own, objective=PPO) as both:
        learn(both, [0])
        found["both"] = list(called)
    return found


SCENARIOS = {
    "frozen_parameters": frozen_parameters,
    "frozen_stage": frozen_stage,
    "forgetful_optimizers": forgetful_optimizers,
    "unsaved_optimizer": unsaved_optimizer,
    "renamed_model": renamed_model,
    "padded_vocabulary": padded_vocabulary,
    "role_overrides": role_overrides,
    "hooks": hooks,
}

if __name__ == "__main__":
    main(SCENARIOS)
