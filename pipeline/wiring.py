"""From settings to the objects that each process holds."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.candidates import candidate_needs
from pipeline.devices import visible_gpus
from pipeline.enqueue_needs import enqueue_needs
from pipeline.failed_groups import FailedGroups
from pipeline.frozen_sources import reference_source, teacher_source
from pipeline.producer import Generator, Producer, ProducerSettings, QueueClient
from pipeline.prompt_source import build_prompt_source
from pipeline.queue_data_source import DataSourceSettings, QueueDataSource
from pipeline.run_folder import RunFolder
from pipeline.storage_declaration import read_declaration
from pipeline.trainer_worker import TrainerWorker
from pipeline.transports.blocking_queue import RayBlockingQueue
from pipeline.transports.carriers import carrier_of
from pipeline.transports.ray_parts import RayParts
from storage.checks import check_enqueue
from storage.columns import encode_group
from storage.contracts import PayloadPool
from storage.dead_letters import DeadLetterBox
from storage.memory_pool import MemoryPool
from storage.pool import Pool
from vime.backends.megatron_utils.hf_config import read_hf_config
from vime.backends.vllm_utils.arguments import split_vllm_flags
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.launch import EngineLaunch
from vime.backends.vllm_utils.server import EngineServer
from vime.rollout.generate import GenerateSettings, SampleGenerator
from vime.rollout.no_reward import no_reward
from vime.rollout.rewards import load_group_reward, load_reward
from vime.rollout.supervised import RecordReader
from vime.rollout.teacher import EngineTeacher
from vime.settings.groups import Settings
from vime.settings.parse import HookArgs
from vime.settings.rules.quantities import context_parallel_size

if TYPE_CHECKING:  # it loads torch, which only trainer ranks need
    from vime.backends.megatron_utils.config import TrainerConfig

NUM_PRODUCERS = 1
"""Producers on one node."""

LOG_PROBS_CHUNK_SIZE = 2048
"""Rows of logits at once in float32, when --log-probs-chunk-size leaves it to vime."""


def create_or_open_pool(settings: Settings) -> Pool:
    """The run's pool, made when it doesn't exist; for the coordinator, which comes first."""
    root, queue = RunFolder.of(settings).queue, settings.queue
    if (root / "vime" / "pool.json").exists():
        return _open_on_disk(settings)
    return Pool.create(
        root,
        queue.rollout_queue_run_id,
        profile="juicefs" if queue.rollout_storage_profile == "juicefs" else "local",
        declaration=read_declaration(queue.rollout_storage_declaration),
        segment_bytes=_segment_bytes(settings),
    )


def open_pool(settings: Settings, coordinator: Any) -> PayloadPool:
    """The run's pool as producers and trainer ranks see it; `coordinator` is the handle of its actor."""
    queue = settings.queue
    if queue.is_in_memory:
        carrier = carrier_of(queue.rollout_data_transport)
        return MemoryPool(queue.rollout_queue_run_id, RayParts(coordinator, carrier))
    return _open_on_disk(settings)


def _open_on_disk(settings: Settings) -> Pool:
    root, run_id = RunFolder.of(settings).queue, settings.queue.rollout_queue_run_id
    return Pool.open(root, run_id, segment_bytes=_segment_bytes(settings))


def _segment_bytes(settings: Settings) -> int | None:
    mib = settings.queue.rollout_queue_segment_mib
    return None if mib is None else mib * 2**20


def build_engine_server(settings: Settings, folder: RunFolder, number: int) -> EngineServer:
    engine_args, _ = split_vllm_flags(settings.vllm_args)
    return EngineServer(
        EngineLaunch(
            hf_checkpoint=Path(settings.checkpoint.hf_checkpoint or ""),
            host="127.0.0.1",
            port=0,
            log_path=folder.log(f"engine_{number}"),
            run_id=settings.queue.rollout_queue_run_id,
            seed=settings.trainer.seed + number,
            device="gpu" if visible_gpus() else "cpu",
            extra_args=tuple(engine_args),
        )
    )


def _planned_steps(settings: Settings) -> int | None:
    """Optimizer steps of the whole run, for a learning rate that decays; a constant one has no end.

    Without an end a finished run can be extended by a larger --num-rollout.
    """
    given = settings.megatron_args
    style = given[given.index("--lr-decay-style") + 1] if "--lr-decay-style" in given[:-1] else "constant"
    return None if style == "constant" else (settings.data.num_rollout or 0) * settings.data.steps_per_rollout


def max_groups_in_flight(settings: Settings, num_engines: int) -> int:
    """Groups that may be generated at once: --vllm-server-concurrency counts samples, at each engine."""
    return settings.rollout.vllm_server_concurrency * max(1, num_engines) // settings.data.n_samples_per_prompt


async def build_producer(
    settings: Settings, queue: QueueClient, pool: PayloadPool, engine_addresses: Sequence[str], number: int
) -> tuple[Producer, list[Callable[[], Awaitable[None]]]]:
    """A producer, and what must be awaited to close what it uses."""
    from transformers import AutoTokenizer

    rollout, data = settings.rollout, settings.data
    engines = [EngineClient(address) for address in engine_addresses]
    producer_settings = ProducerSettings(
        worker_id=f"producer-{number}-{os.getpid()}",
        n_samples_per_prompt=data.n_samples_per_prompt,
        max_groups_in_flight=max_groups_in_flight(settings, len(engines)),
        lease_seconds=settings.queue.rollout_queue_lease_seconds,
        max_attempts=rollout.rollout_max_attempts,
        reward_timeout_s=rollout.reward_timeout,
        reward_key=rollout.reward_key,
        salt_by_version=settings.weights.prefix_cache_salt == "version",
        needs=enqueue_needs(settings, read_hf_config(Path(settings.checkpoint.hf_checkpoint or ""))),
        sc_dtype=settings.queue.rollout_queue_sc_dtype,
    )
    tokenizer = AutoTokenizer.from_pretrained(settings.checkpoint.hf_checkpoint)
    generator: Generator = SampleGenerator(
        tokenizer,
        GenerateSettings(
            max_response_tokens=rollout.rollout_max_response_len or 1,
            temperature=rollout.rollout_temperature,
            apply_chat_template=data.apply_chat_template,
        ),
    )
    if settings.objective.is_supervised:
        generator = RecordReader(tokenizer, data.loss_mask_type, apply_chat_template=data.apply_chat_template)
    unrewarded = rollout.rm_type is None and rollout.custom_rm_path is None
    reward = no_reward if unrewarded else load_reward(rollout.rm_type, rollout.custom_rm_path)
    teacher = await _engine_teacher(settings)
    grouped = load_group_reward(rollout.rm_type, rollout.custom_rm_path) if rollout.group_rm else None
    box = DeadLetterBox(RunFolder.of(settings).dead_letters, producer_settings.worker_id)
    keeps_all = not (settings.queue.is_in_memory or settings.queue.rollout_queue_online_gc)
    failed = FailedGroups(box, pool if keeps_all else None)
    producer = Producer(
        producer_settings,
        queue,
        pool,
        engines,
        generator,
        reward,
        HookArgs(settings),
        failed,
        grouped,
        teacher=teacher,
    )

    async def close_pool() -> None:
        pool.close()

    closers = [engine.close for engine in engines] + ([] if teacher is None else [teacher.close])
    return producer, [*closers, close_pool]


async def _engine_teacher(settings: Settings) -> EngineTeacher | None:
    """The teacher in an engine of someone else's, when there is one; raises what is wrong with it."""
    objective, url = settings.objective, settings.rollout.rm_url
    if not objective.use_opd or objective.opd_type != "vllm" or url is None:
        return None
    teacher = EngineTeacher.at(url)
    await teacher.check()
    return teacher


def build_data_source(settings: Settings, coordinator: Any, *, branch: str, worker_id: str) -> QueueDataSource:
    """The queue as a rollout function of the user's own gets it; `coordinator` is the handle of its actor."""
    queue, data = settings.queue, settings.data
    needs = enqueue_needs(settings, read_hf_config(Path(settings.checkpoint.hf_checkpoint or "")))
    return QueueDataSource(
        RayBlockingQueue(coordinator),
        open_pool(settings, coordinator),
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
        encode=partial(
            encode_group,
            reward_key=settings.rollout.reward_key,
            sc_dtype=queue.rollout_queue_sc_dtype,
            num_experts=None if needs.routes is None else needs.routes.num_experts,
        ),
    )


def trainer_config(settings: Settings, world_size: int) -> TrainerConfig:
    """Settings of one trainer rank."""
    from pipeline.objective import objective_config
    from vime.backends.megatron_utils.config import TrainerConfig

    trainer, objective = settings.trainer, settings.objective
    processes = world_size + settings.cluster.num_engines
    return TrainerConfig(
        hf_checkpoint=Path(settings.checkpoint.hf_checkpoint or ""),
        megatron_argv=settings.megatron_args,
        extra_args_provider_path=trainer.extra_args_provider_path,
        global_batch_size=settings.data.samples_per_step,
        train_iters=_planned_steps(settings),
        lr=trainer.lr,
        clip_grad=trainer.clip_grad,
        seed=trainer.seed,
        objective=objective_config(settings),
        temperature=settings.rollout.rollout_temperature,
        log_probs_chunk_size=LOG_PROBS_CHUNK_SIZE
        if objective.log_probs_chunk_size == -1
        else objective.log_probs_chunk_size,
        reference=reference_source(settings),
        reference_update_interval=settings.checkpoint.ref_update_interval,
        teacher=teacher_source(settings),
        log_probs_max_tokens=_log_probs_max_tokens(settings),
        num_threads=trainer.trainer_num_threads or max(1, (os.cpu_count() or 1) // processes),
        timeout_s=60.0 * trainer.distributed_timeout_minutes,
    )


def _log_probs_max_tokens(settings: Settings) -> int | None:
    """Of a microbatch over all its context-parallel ranks, in passes without gradients."""
    limit = settings.trainer.log_probs_max_tokens_per_gpu
    return None if limit is None else limit * context_parallel_size(settings)


def build_trainer_worker(
    settings: Settings, folder: RunFolder, pool: PayloadPool, rank: int, world_size: int, init_method: str
) -> TrainerWorker:
    from vime.backends.megatron_utils.trainer import MegatronTrainer

    model = MegatronTrainer(trainer_config(settings, world_size), rank, world_size, init_method)
    return TrainerWorker(model, pool, rank, folder.training_log(rank), candidate_needs(settings))
