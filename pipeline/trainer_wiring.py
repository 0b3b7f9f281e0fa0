"""From settings to a trainer rank's worker and models."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.frozen_sources import reference_source, teacher_source
from pipeline.memory_record import memory_record
from pipeline.optional_records import OptionalRecords
from pipeline.run_folder import RunFolder
from pipeline.session_plan import start_source
from pipeline.shard_needs import shard_needs
from pipeline.step_checks import CheckSettings, StepChecks
from pipeline.step_profile import ProfileSettings, StepProfile
from pipeline.step_results import log_result, results_path
from pipeline.token_log import write_token_log
from pipeline.user_functions import user_function
from storage.contracts import PayloadPool
from vime.settings.groups import Settings
from vime.settings.roles import settings_of_role
from vime.settings.rules.quantities import context_parallel_size, has_critic, num_rollout_gpus
from vime.settings.schemas.megatron_config import Role

if TYPE_CHECKING:  # they load torch, which only trainer ranks need
    from pipeline.trainer_worker import Steps, TrainerWorker
    from vime.algorithms.objective_config import ObjectiveConfig
    from vime.backends.megatron_utils.config import CriticConfig, TrainerConfig


LOG_PROBS_CHUNK_SIZE = 2048
"""Rows of logits at once in float32, when --log-probs-chunk-size leaves it to vime."""


def trainer_config(settings: Settings, world_size: int, role: Role = "actor") -> TrainerConfig:
    """Settings of one model of a trainer rank."""
    from pipeline.objective import objective_config
    from pipeline.trainer_hooks import trainer_hooks
    from vime.backends.megatron_utils.config import TrainerConfig

    settings, overrides = settings_of_role(settings, role)
    trainer, objective = settings.trainer, settings.objective
    processes = world_size + num_rollout_gpus(settings)
    return TrainerConfig(
        hf_checkpoint=Path(settings.checkpoint.hf_checkpoint or ""),
        model_name=settings.checkpoint.model_name,
        megatron_argv=settings.megatron_args,
        megatron_overrides=overrides,
        extra_args_provider_path=trainer.extra_args_provider_path,
        num_further=0 if role == "critic" else trainer.mtp_num_layers or 0,
        further_scale=trainer.mtp_loss_scaling_factor,
        global_batch_size=settings.data.samples_per_step,
        train_iters=_planned_steps(settings),
        lr=trainer.lr,
        clip_grad=trainer.clip_grad,
        only_train_params=trainer.only_train_params_name_list,
        freeze_params=trainer.freeze_params_name_list,
        stateless_adam=trainer.use_stateless_adam,
        saves_optimizer=not settings.checkpoint.no_save_optim,
        reset_optimizer_states=trainer.reset_optimizer_states,
        padded_vocab_size=trainer.padded_vocab_size,
        seed=trainer.seed,
        objective=objective_config(settings),
        hooks=trainer_hooks(settings),
        temperature=settings.rollout.rollout_temperature,
        log_probs_chunk_size=LOG_PROBS_CHUNK_SIZE
        if objective.log_probs_chunk_size == -1
        else objective.log_probs_chunk_size,
        replay_routes=objective.use_routing_replay or objective.use_rollout_routing_replay,
        record_routes=objective.use_routing_replay and not objective.use_rollout_routing_replay,
        start=start_source(settings),
        reference=reference_source(settings),
        reference_update_interval=settings.checkpoint.ref_update_interval,
        teacher=teacher_source(settings),
        log_probs_max_tokens=_log_probs_max_tokens(settings),
        distributed_backend=trainer.distributed_backend,
        num_threads=trainer.trainer_num_threads or max(1, (os.cpu_count() or 1) // processes),
        timeout_s=60.0 * trainer.distributed_timeout_minutes,
    )


def _planned_steps(settings: Settings) -> int | None:
    """Optimizer steps of the whole run, for a learning rate that decays; a constant one has no end.

    Without an end a finished run can be extended by a larger --num-rollout.
    """
    given = settings.megatron_args
    style = given[given.index("--lr-decay-style") + 1] if "--lr-decay-style" in given[:-1] else "constant"
    return None if style == "constant" else (settings.data.num_rollout or 0) * settings.data.steps_per_rollout


def _log_probs_max_tokens(settings: Settings) -> int | None:
    """Of a microbatch over all its context-parallel ranks, in passes without gradients."""
    limit = settings.trainer.log_probs_max_tokens_per_gpu
    return None if limit is None else limit * context_parallel_size(settings)


def critic_config(settings: Settings, world_size: int) -> CriticConfig:
    """Settings of the critic of a trainer rank."""
    from vime.backends.megatron_utils.config import CriticConfig

    own, _ = settings_of_role(settings, "critic")
    load, save = own.checkpoint.load, own.checkpoint.save
    return CriticConfig(
        trainer=trainer_config(settings, world_size, "critic"),
        value_clip=own.objective.value_clip,
        load=None if load is None else Path(load),
        save=None if save is None else Path(save),
    )


def build_trainer_worker(
    settings: Settings, folder: RunFolder, pool: PayloadPool, rank: int, world_size: int, init_method: str
) -> TrainerWorker:
    from pipeline.trainer_worker import TrainerWorker
    from pipeline.weight_wiring import trainer_weights
    from vime.backends.megatron_utils.trainer import MegatronTrainer

    memory, records = memory_record(settings, rank), OptionalRecords()
    config = trainer_config(settings, world_size)
    model = MegatronTrainer(config, rank, world_size, init_method)
    critic = None
    if has_critic(settings):
        from vime.backends.megatron_utils.critic import Critic

        critic = Critic(critic_config(settings, world_size), rank, world_size, model.turns)
    return TrainerWorker(
        model,
        pool,
        folder.training_log(rank),
        trainer_weights(settings, model, rank),
        shard_needs(settings, model.route_part),
        critic=critic,
        num_critic_only_steps=settings.objective.num_critic_only_steps,
        dump=_train_data_dump(settings, rank),
        results=partial(log_result, results_path(folder.root, rank)),
        tokens=None
        if settings.queue.is_in_memory
        else partial(write_token_log, folder.token_log, model.data_parallel_rank),
        rank=rank,
        postprocess=_data_postprocess(settings, config.objective),
        checks=StepChecks(CheckSettings.of(settings, rank, starts_elsewhere=config.start is not None)),
        memory=memory,
        records=records,
        traced=StepProfile(ProfileSettings.of(model.megatron_args, folder.profiles, rank), records).traced,
    )


def _train_data_dump(settings: Settings, rank: int) -> Callable[[int, Steps], None] | None:
    """What writes a rank's training columns; None where the settings ask for none."""
    from pipeline.debug.train_data import write_train_data

    template = settings.debug.train_data_template
    return None if template is None else partial(write_train_data, template, rank)


def _data_postprocess(settings: Settings, objective: ObjectiveConfig) -> Callable[[Steps, int], Steps] | None:
    """The user's function on a rollout after its advantages, None without one. Raises `SettingsError`."""
    from vime.backends.megatron_utils.data_postprocess import FLAG, postprocessed

    function = user_function(FLAG, settings.rollout.rollout_data_postprocess_path)
    if function is None:
        return None
    return lambda steps, rollout_id: postprocessed(steps, rollout_id, objective, function)
