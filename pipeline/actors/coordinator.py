"""The queue coordinator's process."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from pipeline.actors.settings import decode_settings
from pipeline.coordinator import Coordinator, open_coordinator
from pipeline.coordinator_config import CoordinatorConfig
from pipeline.messages import AcceptRequest, HeldLease, decode, encode
from pipeline.pool_wiring import create_or_open_pool
from pipeline.process_log import log_to_file
from pipeline.prometheus.exporter import Exporter, on_loop, start_exporter
from pipeline.prompt_source import build_prompt_source
from pipeline.run_folder import RunFolder
from pipeline.transports.memory import open_memory_coordinator
from pipeline.transports.ray_parts import CoordinatorParts
from recovery.commit import QueueState
from storage.files import write_atomically
from storage.positions import PositionRanges
from storage.queue_types import GroupReturn
from vime.errors import VimeError
from vime.settings.groups import Settings

logger = logging.getLogger(__name__)


class CoordinatorActor:
    """The queue coordinator's process. A queue on disk recovers from its journal when Ray restarts it."""

    def __init__(self, settings: bytes, config: bytes) -> None:
        decoded = decode_settings(settings)
        folder = RunFolder.of(decoded)
        log_to_file(folder.log("coordinator"))
        self._parts = CoordinatorParts()
        self._house: asyncio.Task[None] | None = None
        self._exporter: Exporter | None = None
        self._settings, self._folder = decoded, folder
        self._coordinator: Coordinator | VimeError
        try:
            self._coordinator = self._open(decoded, folder, self._newest(decode(config, CoordinatorConfig), folder))
        except VimeError as error:
            # Of an error in here Ray would tell that the actor died; so each call tells what it was.
            logger.exception("the queue can't be opened")
            self._coordinator = error

    async def pid(self) -> int:
        """Its process id; raises what went wrong when the queue was opened, as all calls do."""
        self._opened()
        return os.getpid()

    async def watch(self) -> None:
        """Never returns; its caller learns when the process dies."""
        await asyncio.Event().wait()

    async def lease(self, worker_id: str, max_groups: int, policy_version: int) -> bytes:
        return encode(self._opened().lease(worker_id, max_groups, policy_version))

    async def epoch(self) -> int:
        """Which coordinator of the queue this is."""
        return self._opened().epoch

    async def take_over(self, worker_id: str, held: bytes) -> list[bytes | None]:
        return self._opened().take_over(worker_id, decode(held, list[HeldLease]))

    async def retire(self, worker_name: str) -> None:
        self._opened().retire(worker_name)

    async def begin_branch(self, config: bytes) -> None:
        """See `Coordinator.begin_branch`; a successor of this process goes on with it."""
        write_atomically(self._newest_config, config)
        self._opened().begin_branch(decode(config, CoordinatorConfig))

    async def heartbeat(self, leases: list[bytes]) -> list[bool]:
        return self._opened().heartbeat(leases)

    async def accept(self, requests: bytes) -> bytes:
        return encode(await self._opened().accept(decode(requests, list[AcceptRequest])))

    async def release(self, group_index: int, lease: bytes, reason: str) -> None:
        self._opened().release(group_index, lease, reason)

    async def yield_groups(self, returns: bytes) -> list[bool]:
        return self._opened().yield_groups(decode(returns, list[GroupReturn]))

    async def drop(self, group_index: int, lease: bytes, reason: str) -> None:
        self._opened().drop(group_index, lease, reason)

    async def wait_for_groups(self, count: int, timeout_s: float) -> bytes | None:
        groups = await self._opened().wait_for_groups(count, timeout_s)
        return None if groups is None else encode(groups)

    async def record_plan(self, batch_id: str, positions: list[int], plan: bytes) -> None:
        self._opened().record_plan(batch_id, positions, plan)

    async def training_completed(self, rollout_id: int, policy_version: int, positions: list[int]) -> None:
        self._opened().training_completed(rollout_id, policy_version, positions)

    async def keep_version(self, policy_version: int) -> None:
        """See `Coordinator.keep_version`; a successor of this process knows it, too."""
        self._opened().keep_version(policy_version)
        if not self._settings.queue.is_in_memory:
            write_atomically(self._newest_config, encode(self._opened().config))

    async def identity(self) -> bytes:
        return encode(self._opened().identity())

    async def counts(self) -> bytes:
        return encode(self._opened().counts())

    async def highest_version(self) -> int:
        return self._opened().highest_version()

    async def save_prompt_source(self, rollout_id: int) -> None:
        self._opened().save_prompt_source(rollout_id)

    async def queue_state(self) -> bytes:
        return encode(self._opened().queue_state())

    async def rotate(self, committed: bytes, released: list[tuple[int, int]]) -> None:
        self._opened().rotate(decode(committed, QueueState), PositionRanges(released))

    async def put_parts(self, references: dict[str, list[Any]]) -> None:
        """Keep references to payloads; see `RayParts`."""
        self._parts.put(references)

    async def get_parts(self, key: str, numbers: list[int]) -> list[Any]:
        return self._parts.get(key, numbers)

    async def release_parts(self, keys: list[str]) -> None:
        self._parts.release(keys)

    async def close(self) -> None:
        if isinstance(self._coordinator, VimeError):
            raise self._coordinator
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close)
        if self._house is not None:
            self._house.cancel()
        self._coordinator.close()

    def _newest(self, first: CoordinatorConfig, folder: RunFolder) -> CoordinatorConfig:
        """What the session was told last; a process that Ray starts again is given what it was told first."""
        self._newest_config = folder.coordinator_config(first.session or first.branch)
        if not self._newest_config.exists():
            return first
        return decode(self._newest_config.read_bytes(), CoordinatorConfig)

    def _open(self, settings: Settings, folder: RunFolder, config: CoordinatorConfig) -> Coordinator:
        source = build_prompt_source(settings)
        if settings.queue.is_in_memory:
            return open_memory_coordinator(
                run_id=settings.queue.rollout_queue_run_id,
                parts=self._parts,
                step_log_folder=folder.step_log,
                source=source,
                config=config,
            )
        return open_coordinator(
            open_pool=lambda: create_or_open_pool(settings),
            source=source,
            owner=f"coordinator of {folder.root}",
            config=config,
        )

    def _opened(self) -> Coordinator:
        """The coordinator, with its housekeeping under way; raises what went wrong with either."""
        if isinstance(self._coordinator, VimeError):
            raise self._coordinator
        if self._house is None:
            self._house = asyncio.create_task(self._coordinator.keep_house())
            read = on_loop(self._coordinator.counts, "coordinator")
            self._exporter, _ = start_exporter(self._settings.logging, self._folder, "coordinator", read)
        if self._house.done() and not self._house.cancelled():
            self._house.result()
        return self._coordinator
