"""A producer on a real pool and queue, with a stand-in engine; everything in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.coordinator import Coordinator, open_coordinator
from pipeline.coordinator_config import CoordinatorConfig
from pipeline.failed_groups import FailedGroups
from pipeline.group_maker import GroupMaker, GroupSettings
from pipeline.messages import AcceptReply, AcceptRequest, HeldLease, LeaseReply
from pipeline.producer import Producer, ProducerSettings
from pipeline.queue_data_source import DataSourceSettings, QueueDataSource
from pipeline.request_gate import RequestGate
from pipeline.rollout_runner import GroupAttempts, RolloutRunner, RunnerSettings
from pipeline.sample_maker import Generator, MakerSettings, SampleMaker, Teacher
from pipeline.serving_engines import ServingEngines
from pipeline.transports.memory import open_memory_coordinator
from storage.checks import EnqueueRequirements, check_enqueue
from storage.columns import encode_group
from storage.contracts import PayloadPool
from storage.dead_letters import DeadLetterBox, letters_folder
from storage.memory_parts import PartTable
from storage.memory_pool import MemoryPool
from storage.pool import Pool
from storage.queue_types import GroupReturn
from storage.writer import WriteLimits
from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import NO_COLUMNS, SampleColumns
from vime.data.prompts import PromptSource
from vime.rollout.dynamic_filter import DynamicFilter
from vime.rollout.generate import GenerateSettings, SampleGenerator
from vime.rollout.group_collector import GroupCollector
from vime.rollout.own_functions import OwnFunctions
from vime.rollout.own_generate import OwnGenerate
from vime.rollout.rewards import GroupRewardFunction, RewardFunction
from vime.rollout.sample_hooks import SampleHooks
from vime.rollout.sampling import SamplingSettings
from vime.utils.types import Sample

SETTINGS = ProducerSettings(worker_id="producer", n_samples_per_prompt=2, max_groups_in_flight=4, lease_seconds=60.0)
GROUP_SETTINGS = GroupSettings(reward_timeout_s=0.5, reward_key=None, needs=EnqueueRequirements(), sc_dtype="float16")


async def constant_reward(args: Any, sample: Sample) -> float:  # noqa: ARG001
    return 1.0


class CharTokenizer:
    """One token a character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:  # noqa: ARG002
        return [ord(character) % 40 for character in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:  # noqa: ARG002
        return "".join(chr(97 + token % 26) for token in token_ids)

    def apply_chat_template(self, conversation: list[dict[str, Any]], **_: Any) -> str:
        return "".join(message["content"] for message in conversation)


class LocalQueue:
    """The coordinator without a process boundary."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.released: list[str] = []
        self.yielded: list[GroupReturn] = []

    async def lease(self, worker_id: str, max_groups: int, policy_version: int) -> LeaseReply:
        return self.coordinator.lease(worker_id, max_groups, policy_version)

    async def epoch(self) -> int:
        return self.coordinator.epoch

    async def take_over(self, worker_id: str, held: list[HeldLease]) -> list[bytes | None]:
        return self.coordinator.take_over(worker_id, held)

    async def heartbeat(self, leases: list[bytes]) -> list[bool]:
        return self.coordinator.heartbeat(leases)

    async def accept(self, requests: list[AcceptRequest]) -> list[AcceptReply]:
        return await self.coordinator.accept(requests)

    async def release(self, group_index: int, lease: bytes, reason: str) -> None:
        self.released.append(reason)
        self.coordinator.release(group_index, lease, reason)

    async def yield_groups(self, returns: list[GroupReturn]) -> list[bool]:
        self.yielded += returns
        return self.coordinator.yield_groups(returns)

    async def drop(self, group_index: int, lease: bytes, reason: str) -> None:
        self.coordinator.drop(group_index, lease, reason)


class BlockingLocalQueue:
    """The same for code in other threads."""

    def __init__(self, queue: LocalQueue, loop: asyncio.AbstractEventLoop) -> None:
        self._queue, self._loop = queue, loop

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._queue, name)
        return lambda *args: asyncio.run_coroutine_threadsafe(call(*args), self._loop).result()


@dataclass
class Parts:
    """What a test drives."""

    coordinator: Coordinator
    queue: LocalQueue
    producer: Any
    client: EngineClient
    running: asyncio.Task[None]
    pool: PayloadPool

    async def until_pending(self, count: int, timeout_s: float = 20.0) -> None:
        """Wait until so many groups are accepted."""
        waiting = asyncio.create_task(self.coordinator.wait_for_groups(count, timeout_s))
        await asyncio.wait([waiting, self.running], return_when=asyncio.FIRST_COMPLETED)
        if self.running.done():
            self.running.result()
        assert await waiting is not None, self.coordinator.counts()


def _on_disk(folder: Path, source: PromptSource, config: CoordinatorConfig) -> tuple[Coordinator, PayloadPool]:
    coordinator = open_coordinator(
        open_pool=lambda: Pool.create(folder / "pool", "rollout"), source=source, owner="test", config=config
    )
    return coordinator, Pool.open(folder / "pool")


def _in_memory(folder: Path, source: PromptSource, config: CoordinatorConfig) -> tuple[Coordinator, PayloadPool]:
    parts: PartTable[bytes] = PartTable()
    coordinator = open_memory_coordinator(
        run_id="rollout", parts=parts, step_log_folder=folder / "step_log", source=source, config=config
    )
    return coordinator, MemoryPool("rollout", parts)


@asynccontextmanager
async def stream(
    folder: Path,
    engine: StandinEngine,
    *,
    reward: RewardFunction = constant_reward,
    groups_wanted: int = 100,
    max_groups: int = 8,
    response_tokens: int = 6,
    apply_chat_template: bool = False,
    columns: SampleColumns = NO_COLUMNS,
    group_reward: GroupRewardFunction | None = None,
    in_memory: bool = False,
    paused: bool = False,
    num_prompts: int = 40,
    write_limits: WriteLimits | None = None,
    generator: Generator | None = None,
    teacher: Teacher | None = None,
    replaces_engines: bool = False,
    rollout_args: SimpleNamespace | None = None,
    **changes: Any,
) -> AsyncIterator[Parts]:
    """A running producer, admitted at policy version 1 unless `paused`; with a `generator` it has no engine.

    With `rollout_args` rollouts are made by the function that they name, one after another.
    """
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(f'{{"input": "prompt {number}"}}\n' for number in range(num_prompts)))
    source = PromptSource(prompts, n_samples_per_prompt=changes.get("n_samples_per_prompt", 2))
    config = CoordinatorConfig(
        "branch", [], groups_wanted, max_groups, lease_seconds=60.0, surplus=changes.get("surplus", 0)
    )
    coordinator, opened = (_in_memory if in_memory else _on_disk)(folder, source, config)
    queue = LocalQueue(coordinator)
    engines_serve = generator is None
    generator = generator or SampleGenerator(
        CharTokenizer(), GenerateSettings(apply_chat_template=apply_chat_template, columns=columns)
    )
    settings = replace(SETTINGS, **_known(SETTINGS, changes))
    grouped = replace(GROUP_SETTINGS, **_known(GROUP_SETTINGS, changes))
    making = MakerSettings(
        SamplingSettings(response_tokens, 1.0, top_p=0.9 if columns.nucleus else 1.0),
        grouped.reward_timeout_s,
        grouped.reward_key,
        salt_by_version=True,
        generate_function_path=changes.get("generate_function_path"),
    )
    functions = OwnFunctions()
    hooks = SampleHooks(functions, None, changes.get("hook_paths", ()))
    with closing(functions), closing(opened) as pool:
        async with EngineClient(engine.address) as client:
            gate = RequestGate(ServingEngines([client] if engines_serve else [], are_replaced=replaces_engines))
            samples = SampleMaker(
                making,
                gate,
                generator,
                None if group_reward else reward,
                None,
                teacher,
                OwnGenerate(functions, None),
                hooks,
            )
            groups = GroupMaker(grouped, samples, None, group_reward)
            box = DeadLetterBox(letters_folder(folder), "producer")
            failed = FailedGroups(box, pool, changes.get("max_attempts", 2))
            dynamic_filter = DynamicFilter(functions, SimpleNamespace(reward_key=None), changes.get("filter_path"))
            producer: Any = Producer(settings, queue, pool, gate, groups, failed, dynamic_filter, write_limits)
            if rollout_args is not None:
                attempts = GroupAttempts(groups, failed)
                sizes = num_prompts, settings.n_samples_per_prompt
                producer = _runner(folder, rollout_args, queue, pool, gate, attempts, dynamic_filter, *sizes)
            running = asyncio.create_task(producer.run())
            if not paused:
                producer.gate.resume(1)
            try:
                yield Parts(coordinator, queue, producer, client, running, pool)
            finally:
                producer.stop()
                await asyncio.wait([running], timeout=20)
                queue.coordinator.close()


def _known(settings: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes that are about these settings."""
    return {name: value for name, value in changes.items() if name in settings.__dataclass_fields__}


def _runner(
    folder: Path,
    args: SimpleNamespace,
    queue: LocalQueue,
    pool: Any,
    gate: RequestGate,
    attempts: GroupAttempts,
    dynamic_filter: DynamicFilter,
    num_prompts: int,
    num_members: int,
) -> RolloutRunner:
    loop = asyncio.get_running_loop()

    def open_source() -> QueueDataSource:
        settings = DataSourceSettings("runner", "branch", num_prompts, num_members, 60.0, folder / "state")
        check = partial(check_enqueue, needs=EnqueueRequirements())
        blocking: Any = BlockingLocalQueue(queue, loop)
        return QueueDataSource(
            blocking, pool, settings, check=check, encode=encode_group, policy_version=lambda: gate.policy_version
        )

    collector = GroupCollector(attempts, dynamic_filter, max_running=4)
    settings = RunnerSettings(args.rollout_function_path, lambda: 3, open_source)
    return RolloutRunner(settings, gate, attempts, collector, args)
