"""The coordinator as the driver sees it: its process, and the calls that the run loop makes."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

from pipeline.actors.coordinator import CoordinatorActor
from pipeline.cluster import Cluster, answer
from pipeline.coordinator_config import CoordinatorConfig
from pipeline.messages import QueueCounts, decode, encode
from pipeline.planner import BatchPlan
from pipeline.process_watch import ProcessWatch
from pipeline.transports.ray_parts import COORDINATOR_S
from recovery.accounting import Identity
from recovery.commit import QueueState
from storage.positions import PositionRanges
from storage.queue_types import AcceptedGroup

_Result = TypeVar("_Result")

RESTARTS = 20


class CoordinatorHandle:
    """Each call waits for a successor where Ray has to start one, and raises `StalledError` when none answers."""

    def __init__(self, settings: bytes, cluster: Cluster, watch: ProcessWatch, *, in_memory: bool) -> None:
        """With `in_memory` the queue dies with its process, whose end is then told by `watch`."""
        self._settings, self._cluster, self._watch, self._in_memory = settings, cluster, watch, in_memory
        self.actor: Any = None
        """None before the start."""

    async def start(self, config: CoordinatorConfig) -> None:
        """Open the queue. Ray restarts the actor when its process dies, unless its queue dies with it."""
        restarts = 0 if self._in_memory else RESTARTS
        self.actor = self._cluster.spawn(CoordinatorActor, self._settings, encode(config), restarts=restarts)
        await _answer(self.actor.pid.remote())
        if self._in_memory:
            self._watch.add("coordinator", self.actor.watch.remote())

    async def begin_branch(self, config: CoordinatorConfig) -> None:
        """Have the queue keep the books of another branch."""
        await _answer(self.actor.begin_branch.remote(encode(config)))

    async def wait_for_groups(self, count: int, timeout_s: float) -> list[AcceptedGroup] | None:
        content = await _answer(self.actor.wait_for_groups.remote(count, timeout_s))
        return None if content is None else decode(content, list[AcceptedGroup])

    async def record_plan(self, plan: BatchPlan, content: bytes) -> None:
        await _answer(self.actor.record_plan.remote(plan.batch_id, plan.positions, content))

    async def training_completed(self, plan: BatchPlan) -> None:
        await _answer(self.actor.training_completed.remote(plan.rollout_id, plan.policy_version, plan.positions))

    async def identity(self) -> Identity:
        return decode(await _answer(self.actor.identity.remote()), Identity)

    async def counts(self) -> QueueCounts:
        return decode(await _answer(self.actor.counts.remote()), QueueCounts)

    async def save_prompt_source(self, rollout_id: int) -> None:
        """Have a data source of the user's own save its place, as part of a commit."""
        await _answer(self.actor.save_prompt_source.remote(rollout_id))

    async def state(self) -> QueueState:
        return decode(await _answer(self.actor.queue_state.remote()), QueueState)

    async def rotate(self, committed: QueueState, released: PositionRanges) -> None:
        """Tell the queue that a commit with this state is on disk, and which positions no kept commit needs."""
        await _answer(self.actor.rotate.remote(encode(committed), released.ranges()))

    async def keep_version(self, policy_version: int) -> None:
        """Tell the queue that the next batch is planned under this version, too."""
        await _answer(self.actor.keep_version.remote(policy_version))

    async def highest_version(self) -> int:
        version: int = await _answer(self.actor.highest_version.remote())
        return version

    async def retire(self, worker: str) -> None:
        """Give back what a producer that has died was at."""
        await _answer(self.actor.retire.remote(worker))


async def _answer(reference: Awaitable[_Result]) -> _Result:
    return await answer(reference, "the queue coordinator", within_s=COORDINATOR_S)
