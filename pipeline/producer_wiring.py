"""From settings to a producer, and to what makes its samples."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pipeline.activity import ActivityBoard
from pipeline.debug.stored_generator import StoredGenerator
from pipeline.enqueue_needs import enqueue_needs
from pipeline.failed_groups import FailedGroups
from pipeline.generate_settings import generate_settings, rollout_sampling
from pipeline.group_maker import GroupMaker, GroupSettings
from pipeline.group_wiring import build_data_source
from pipeline.messages import QueueCounts, decode
from pipeline.model_config import model_config
from pipeline.pool_wiring import open_bounded_pool
from pipeline.producer import Producer, ProducerSettings
from pipeline.queue_client import QueueClient
from pipeline.queue_data_source import QueueDataSource
from pipeline.request_gate import RequestGate
from pipeline.rollout_runner import GroupAttempts, RolloutRunner, RunnerSettings
from pipeline.run_folder import RunFolder
from pipeline.sample_maker import Generator, MakerSettings, SampleMaker
from pipeline.serving_engines import ServingEngines
from pipeline.transports.ray_parts import answer_of
from recovery.branch import read_branches
from storage.dead_letters import DeadLetterBox
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.engine_http import Poster
from vime.backends.vllm_utils.routed import RoutedClient
from vime.rollout.dynamic_filter import DynamicFilter
from vime.rollout.generate import SampleGenerator
from vime.rollout.group_collector import GroupCollector
from vime.rollout.model_url import get_model_url
from vime.rollout.no_reward import no_reward
from vime.rollout.own_functions import OwnFunctions
from vime.rollout.own_generate import OwnGenerate
from vime.rollout.rewards import RewardFunction, Rewards
from vime.rollout.sample_hooks import SampleHooks
from vime.rollout.supervised import RecordReader
from vime.rollout.teacher import EngineTeacher
from vime.rollout.tokenizer import load_tokenizer
from vime.settings.groups import Settings
from vime.settings.parse import HookArgs
from vime.settings.rules.quantities import is_stream

Closer = Callable[[], Awaitable[None]]


def worker_name(number: int) -> str:
    """Of a producer's processes in the queue; each adds its process id."""
    return f"producer-{number}"


def reward_name(settings: Settings) -> str:
    """What scores the samples, in words."""
    rollout = settings.rollout
    return rollout.custom_rm_path or rollout.rm_url or rollout.rm_type or "the reward"


def max_groups_in_flight(settings: Settings, num_engines: int) -> int:
    """Groups that a producer may generate at once: --vllm-server-concurrency counts samples, at each engine."""
    samples = settings.rollout.vllm_server_concurrency * max(1, num_engines)
    return samples // (settings.queue.rollout_num_producers * settings.data.n_samples_per_prompt)


async def build_producer(
    settings: Settings,
    coordinator: Any,
    queue: QueueClient,
    engine_addresses: Sequence[str],
    number: int,
    activity: ActivityBoard,
    poster: Poster | None = None,
) -> tuple[Producer | RolloutRunner, list[Closer]]:
    """What makes the run's groups, and what must be awaited to close what it uses.

    `coordinator` is the handle of its actor, `queue` the same as producers call it. What groups are at is noted on
    `activity`. `poster` sends requests for samples in place of this process.
    """
    engines = [EngineClient(address, poster=poster) for address in engine_addresses]
    router = _router(settings, poster)
    serving = ServingEngines(
        engines,
        router=router,
        run_id=settings.queue.rollout_queue_run_id,
        are_replaced=settings.engine.use_fault_tolerance,
    )
    gate, functions, rewards = RequestGate(serving), OwnFunctions(), build_rewards(settings)
    if rewards is not None:
        rewards.start()
    samples, closers = await build_sample_maker(settings, gate, rewards, functions, activity)
    args, rollout = HookArgs(settings), settings.rollout
    groups = GroupMaker(
        GroupSettings(
            reward_timeout_s=rollout.reward_timeout,
            reward_key=rollout.reward_key,
            needs=enqueue_needs(settings, model_config(settings)),
            sc_dtype=settings.queue.rollout_queue_sc_dtype,
            continues_aborted=rollout.partial_rollout,
            masks_continued=rollout.mask_offpolicy_in_partial_rollout,
        ),
        samples,
        args,
        rewards.of_group if rewards is not None and rollout.group_rm else None,
        activity,
    )
    dynamic_filter = DynamicFilter(functions, args, rollout.dynamic_sampling_filter_path)

    async def close_functions() -> None:
        functions.close()

    closers += [*(engine.close for engine in engines), *([] if router is None else [router.close])]
    closers += [*([] if rewards is None else [rewards.close]), close_functions]
    in_flight, worker_id = max_groups_in_flight(settings, len(engines)), f"{worker_name(number)}-{os.getpid()}"
    pool = open_bounded_pool(settings, coordinator)
    box = DeadLetterBox(RunFolder.of(settings).dead_letters, worker_id)
    keeps_all = not (settings.queue.is_in_memory or settings.queue.rollout_queue_online_gc)
    failed = FailedGroups(box, pool if keeps_all else None, rollout.rollout_max_attempts)

    async def close_pool() -> None:
        pool.close()

    closers.append(close_pool)
    if not is_stream(settings):
        attempts = GroupAttempts(groups, failed)
        return _build_runner(settings, coordinator, gate, attempts, dynamic_filter, in_flight, worker_id), closers
    producer = Producer(
        ProducerSettings(
            worker_id=worker_id,
            n_samples_per_prompt=settings.data.n_samples_per_prompt,
            max_groups_in_flight=in_flight,
            lease_seconds=settings.queue.rollout_queue_lease_seconds,
        ),
        queue,
        pool,
        gate,
        groups,
        failed,
        dynamic_filter,
        activity=activity,
    )
    return producer, closers


def _build_runner(
    settings: Settings,
    coordinator: Any,
    gate: RequestGate,
    attempts: GroupAttempts,
    dynamic_filter: DynamicFilter,
    in_flight: int,
    worker_id: str,
) -> RolloutRunner:
    def open_source() -> QueueDataSource:
        branch = read_branches(RunFolder.of(settings).root)[-1].branch
        return build_data_source(
            settings,
            coordinator,
            branch=branch,
            worker_id=worker_id,
            policy_version=lambda: gate.policy_version,
        )

    def first_rollout() -> int:
        counts = decode(answer_of(coordinator.counts.remote()), QueueCounts)
        return (counts.trained + counts.pending) // (settings.data.rollout_batch_size or 1)

    return RolloutRunner(
        RunnerSettings(settings.rollout.rollout_function_path, first_rollout, open_source),
        gate,
        attempts,
        GroupCollector(attempts, dynamic_filter, max_running=in_flight),
        HookArgs(settings),
    )


def _router(settings: Settings, poster: Poster | None) -> RoutedClient | None:
    """The router of the model that is trained, in a run that has started one or was given one."""
    if not settings.model_routers:
        return None
    trained = settings.model_routers[0]
    return RoutedClient(f"http://{trained.host}:{trained.port}", poster=poster)


def build_rewards(settings: Settings) -> Rewards | None:
    """The rewards that the settings name, None in a run that is not about rewards. To be closed."""
    unrewarded = settings.rollout.rm_type is None and settings.rollout.custom_rm_path is None
    return None if unrewarded else Rewards(settings)


async def build_sample_maker(
    settings: Settings,
    gate: RequestGate,
    rewards: Rewards | None,
    functions: OwnFunctions,
    activity: ActivityBoard | None = None,
) -> tuple[SampleMaker, list[Closer]]:
    """What makes the run's samples, and what must be awaited to close what it uses.

    `rewards` and `functions`, which call those of the user's own, stay the caller's.
    """
    rollout = settings.rollout
    reward: RewardFunction | None = no_reward if rewards is None else rewards.of_sample
    teacher = await _engine_teacher(settings)
    args, stored = HookArgs(settings), _stored_generator(settings)
    maker = SampleMaker(
        MakerSettings(
            sampling=rollout_sampling(settings),
            reward_timeout_s=rollout.reward_timeout,
            reward_key=rollout.reward_key,
            salt_by_version=settings.weights.prefix_cache_salt == "version",
            generate_function_path=rollout.custom_generate_function_path,
        ),
        gate,
        build_generator(settings) if stored is None else stored,
        None if rollout.group_rm and rewards is not None else reward,
        args,
        teacher,
        OwnGenerate(functions, args) if stored is None else None,
        SampleHooks(functions, args, rollout.rollout_sample_hook_path),
        activity,
    )

    return maker, [] if teacher is None else [teacher.close]


def _stored_generator(settings: Settings) -> StoredGenerator | None:
    """What takes the place of generation where samples are stored already."""
    template, data = settings.debug.load_forge_rollout_data, settings.data
    if template is None:
        return None
    batch_size = data.rollout_batch_size or 1
    return StoredGenerator(template, batch_size=batch_size, group_size=data.n_samples_per_prompt)


def build_generator(settings: Settings) -> Generator:
    """What fills the run's samples, with a tokenizer of its own."""
    data = settings.data
    tokenizer = load_tokenizer(settings.checkpoint.hf_checkpoint)
    if settings.objective.is_supervised:
        return RecordReader(tokenizer, data.loss_mask_type, apply_chat_template=data.apply_chat_template)
    return SampleGenerator(tokenizer, generate_settings(settings))


async def _engine_teacher(settings: Settings) -> EngineTeacher | None:
    """The teacher in an engine, when there is one: behind the router of a served model, or someone else's.

    Raises what is wrong with it.
    """
    objective, url = settings.objective, settings.rollout.rm_url
    if not objective.use_opd or objective.opd_type != "vllm":
        return None
    by_position = objective.opd_teacher_scoring == "per-position"
    temperature = settings.rollout.rollout_temperature if by_position else None
    if objective.opd_teacher_model is not None:
        return EngineTeacher.at(get_model_url(HookArgs(settings), objective.opd_teacher_model), temperature)
    if url is None:
        return None
    teacher = EngineTeacher.at(url, temperature)
    await teacher.check()
    return teacher
