"""From settings to the objects that each process holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.devices import visible_gpus
from pipeline.enqueue_needs import enqueue_needs
from pipeline.frozen_sources import reference_source, teacher_source
from pipeline.memory_record import memory_record
from pipeline.model_config import model_config
from pipeline.optional_records import OptionalRecords
from pipeline.prompt_source import build_prompt_source
from pipeline.queue_data_source import DataSourceSettings, QueueDataSource
from pipeline.run_folder import RunFolder
from pipeline.sample_columns import sample_columns
from pipeline.sample_conversion import Conversion
from pipeline.session_plan import start_source
from pipeline.shard_needs import shard_needs
from pipeline.step_checks import CheckSettings, StepChecks
from pipeline.step_profile import ProfileSettings, StepProfile
from pipeline.step_results import log_result, results_path
from pipeline.storage_declaration import read_declaration
from pipeline.token_log import write_token_log
from pipeline.transports.blocking_queue import RayBlockingQueue
from pipeline.transports.carriers import carrier_of
from pipeline.transports.ray_parts import RayParts
from pipeline.user_functions import user_function
from storage.bounded_pool import BoundedPool
from storage.checks import EnqueueRequirements, check_enqueue
from storage.columns import EncodedGroup, encode_group
from storage.contracts import PayloadPool
from storage.memory_pool import MemoryPool
from storage.pool import Pool
from vime.backends.vllm_utils.arguments import split_vllm_flags
from vime.backends.vllm_utils.kept import Keeping
from vime.backends.vllm_utils.launch import EngineLaunch, EnginePart
from vime.backends.vllm_utils.protocol import NO_COLUMNS, SampleColumns
from vime.backends.vllm_utils.server import EngineServer
from vime.settings.groups import Settings
from vime.settings.roles import settings_of_role
from vime.settings.rules.quantities import context_parallel_size, engine_workers, has_critic, num_rollout_gpus
from vime.settings.schemas.megatron_config import Role
from vime.settings.served_models import EngineSpec
from vime.utils.types import Sample

if TYPE_CHECKING:  # they load torch, which only trainer ranks need
    from pipeline.trainer_worker import Steps, TrainerWorker
    from vime.algorithms.objective_config import ObjectiveConfig
    from vime.backends.megatron_utils.config import CriticConfig, TrainerConfig

LOG_PROBS_CHUNK_SIZE = 2048
"""Rows of logits at once in float32, when --log-probs-chunk-size leaves it to vime."""


def create_or_open_pool(settings: Settings) -> Pool:
    """The run's pool, made when it doesn't exist; for the coordinator, which comes first."""
    root, queue = RunFolder.of(settings).queue, settings.queue
    if (root / "vime" / "pool.json").exists():
        return open_pool_on_disk(settings)
    return Pool.create(
        root,
        queue.rollout_queue_run_id,
        profile="juicefs" if queue.rollout_storage_profile == "juicefs" else "local",
        declaration=read_declaration(queue.rollout_storage_declaration),
        segment_bytes=_segment_bytes(settings),
    )


def open_pool(settings: Settings, coordinator: Any) -> PayloadPool:
    """The run's pool, made by the coordinator before; `coordinator` is the handle of its actor."""
    queue = settings.queue
    if queue.is_in_memory:
        carrier = carrier_of(queue.rollout_data_transport)
        return MemoryPool(queue.rollout_queue_run_id, RayParts(coordinator, carrier))
    return open_pool_on_disk(settings)


def open_bounded_pool(settings: Settings, coordinator: Any) -> PayloadPool:
    """The run's pool as producers and trainer ranks use it: so many threads at once as the settings say."""
    return BoundedPool(open_pool(settings, coordinator), settings.queue.rollout_io_concurrency)


def open_pool_on_disk(settings: Settings) -> Pool:
    """The run's pool, where it is on disk."""
    root, run_id = RunFolder.of(settings).queue, settings.queue.rollout_queue_run_id
    return Pool.open(root, run_id, segment_bytes=_segment_bytes(settings))


def _segment_bytes(settings: Settings) -> int | None:
    mib = settings.queue.rollout_queue_segment_mib
    return None if mib is None else mib * 2**20


def build_engine_server(
    settings: Settings,
    folder: RunFolder,
    number: int,
    spec: EngineSpec,
    *,
    host: str = "127.0.0.1",
    part: EnginePart | None = None,
) -> EngineServer:
    """One engine, or its part on one node; `host` is that node's address. Only one without parts can be kept."""
    engine_args, _ = split_vllm_flags(spec.vllm_args)
    workers = engine_workers(spec)
    name = f"engine_{number}" if part is None or not part.number else f"engine_{number}_part_{part.number}"
    session = settings.queue.rollout_session_id
    return EngineServer(
        EngineLaunch(
            hf_checkpoint=Path(spec.checkpoint),
            host=host,
            port=0,
            log_path=folder.log(name),
            run_id=settings.queue.rollout_queue_run_id,
            seed=settings.trainer.seed + number,
            tensor_size=workers.tensor,
            num_workers=workers.total,
            part=part,
            sleeps=settings.cluster.engines_leave_memory,
            strict_parity=settings.engine.backend_parity == "strict",
            device="gpu" if visible_gpus() else "cpu",
            extra_args=tuple(engine_args),
            columns=engine_columns(settings, spec),
        ),
        stop_grace_s=settings.engine.rollout_cleanup_timeout,
        keeping=None if session is None or part is not None else Keeping(folder.kept_engines, name, session),
    )


def engine_columns(settings: Settings, spec: EngineSpec) -> SampleColumns:
    """What an engine must return of each token; one that isn't trained only scores and answers."""
    return sample_columns(settings) if spec.is_trained else NO_COLUMNS


def _planned_steps(settings: Settings) -> int | None:
    """Optimizer steps of the whole run, for a learning rate that decays; a constant one has no end.

    Without an end a finished run can be extended by a larger --num-rollout.
    """
    given = settings.megatron_args
    style = given[given.index("--lr-decay-style") + 1] if "--lr-decay-style" in given[:-1] else "constant"
    return None if style == "constant" else (settings.data.num_rollout or 0) * settings.data.steps_per_rollout


def build_data_source(
    settings: Settings, coordinator: Any, *, branch: str, worker_id: str, policy_version: Callable[[], int]
) -> QueueDataSource:
    """The queue as a rollout function of the user's own gets it; `coordinator` is the handle of its actor."""
    queue, data = settings.queue, settings.data
    needs = enqueue_needs(settings, model_config(settings))
    return QueueDataSource(
        RayBlockingQueue(coordinator),
        open_bounded_pool(settings, coordinator),
        DataSourceSettings(
            worker_id=worker_id,
            branch=branch,
            num_prompts=len(build_prompt_source(settings)),
            n_samples_per_prompt=data.n_samples_per_prompt,
            lease_seconds=queue.rollout_queue_lease_seconds,
            state_folder=RunFolder.of(settings).root / "rollout",
            reward_key=settings.rollout.reward_key,
        ),
        check=partial(check_enqueue, needs=needs),
        encode=group_encoder(settings, needs),
        policy_version=policy_version,
    )


def build_conversion(settings: Settings) -> Conversion | None:
    """How what --custom-convert-samples-to-train-data-path makes is checked and stored; None without it."""
    if settings.rollout.custom_convert_samples_to_train_data_path is None:
        return None
    needs = enqueue_needs(settings, model_config(settings))
    return Conversion(partial(check_enqueue, needs=needs), group_encoder(settings, needs))


def group_encoder(settings: Settings, needs: EnqueueRequirements) -> Callable[[Sequence[Sample]], EncodedGroup]:
    """What makes a group's columns."""
    return partial(
        encode_group,
        reward_key=settings.rollout.reward_key,
        sc_dtype=settings.queue.rollout_queue_sc_dtype,
        num_experts=None if needs.routes is None else needs.routes.num_experts,
    )


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
