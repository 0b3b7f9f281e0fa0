"""Groups on their way from a producer to the queue: durable first, then accepted, or taken back."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from pipeline.activity import ActivityBoard, Phase
from pipeline.group_maker import MadeGroup, UnfinishedGroup
from pipeline.group_start import oldest_of
from pipeline.held_groups import HeldGroup, HeldGroups
from pipeline.messages import AcceptRequest
from pipeline.producer_counts import ProducerCounts
from pipeline.queue_client import QueueClient
from storage.columns import EncodedGroup
from storage.queue_types import GroupReturn, Stage
from storage.refs import GroupRef
from storage.writer import GroupPublisher, GroupWriter, WriteLimits
from vime.utils.kill_points import KillPoint, reach


@dataclass(frozen=True)
class _Outgoing:
    """A group on its way to the pool: made, or to be gone on with."""

    held: HeldGroup
    lease: bytes
    """The one that it is published for."""
    outcome: MadeGroup | UnfinishedGroup
    group: EncodedGroup


class GroupOutbox:
    """What was put in reaches the queue once, under the lease that its group has by then, or is refused as stale."""

    def __init__(
        self,
        queue: QueueClient,
        pool: GroupPublisher,
        worker_id: str,
        held: HeldGroups,
        counts: ProducerCounts,
        activity: ActivityBoard,
        begin: Callable[[Coroutine[object, object, None]], object],
        room_changed: Callable[[], None],
        write_limits: WriteLimits | None = None,
    ) -> None:
        """`begin` has work on a group go on beside; `room_changed` is called when `is_full` may have changed."""
        self._queue, self._held, self._counts, self._activity = queue, held, counts, activity
        self._begin, self._room_changed = begin, room_changed
        self._writer: GroupWriter[_Outgoing] = GroupWriter(pool, worker_id, write_limits)
        self._num_putting = 0

    @property
    def is_full(self) -> bool:
        """Whether a group waits for room."""
        return self._num_putting > 0

    async def put(self, held: HeldGroup, outcome: MadeGroup | UnfinishedGroup, group: EncodedGroup) -> None:
        """Hand a group to the writer, which may make this wait."""
        held.is_outgoing = True
        self._num_putting += 1
        self._room_changed()
        try:
            reach(KillPoint.BEFORE_PUBLISH)
            lease = held.work.lease
            with self._activity.doing(Phase.WRITING, held.work.group_index, []):
                await self._writer.put(group, lease, _Outgoing(held, lease, outcome, group))
        finally:
            self._num_putting -= 1
            self._room_changed()

    def close_input(self) -> None:
        """See `GroupWriter.close_input`."""
        self._writer.close_input()

    async def join(self) -> None:
        """Until what was put in is with the queue."""
        await self._writer.join()

    async def run(self) -> None:
        """Have accepted, or taken back, what became durable: all of one transaction together. Until cancelled."""
        async for batch in self._writer.batches():
            reach(KillPoint.AFTER_PUBLISH)
            refused = [*await self._accept(batch), *await self._yield(batch)]
            await self._after_refusals(refused)
            again = {id(item.held) for item in refused if item.held.work.lease != item.lease}
            for item, _ in batch:
                if id(item.held) not in again:
                    self._held.let_go(item.held)

    async def _accept(self, batch: Sequence[tuple[_Outgoing, GroupRef]]) -> list[_Outgoing]:
        """Have those that are made accepted; the ones that were refused."""
        made = [(item, item.outcome, ref) for item, ref in batch if isinstance(item.outcome, MadeGroup)]
        if not made:
            return []
        replies = await self._queue.accept(
            [AcceptRequest(item.lease, ref, outcome.summary) for item, outcome, ref in made]
        )
        for (_, outcome, _), reply in zip(made, replies, strict=True):
            if reply.position is not None:
                self._counts.answered(outcome.samples, accepted=True)
        return [item for (item, _, _), reply in zip(made, replies, strict=True) if reply.position is None]

    async def _yield(self, batch: Sequence[tuple[_Outgoing, GroupRef]]) -> list[_Outgoing]:
        """Have those that are to be gone on with taken back; the ones that were refused."""
        returns = [
            (item, GroupReturn(item.lease, ref, Stage.PARTIAL, oldest_of(item.outcome.samples)))
            for item, ref in batch
            if isinstance(item.outcome, UnfinishedGroup)
        ]
        if not returns:
            return []
        done = await self._queue.yield_groups([group for _, group in returns])
        return [item for (item, _), went_back in zip(returns, done, strict=True) if not went_back]

    async def _after_refusals(self, refused: Sequence[_Outgoing]) -> None:
        """Publish again what was refused only because its lease is of another coordinator; the rest is stale."""
        if refused:
            await self._held.notice_coordinator()
        for item in refused:
            if item.held.work.lease != item.lease:
                self._begin(self.put(item.held, item.outcome, item.group))
            elif isinstance(item.outcome, MadeGroup):
                self._counts.answered(item.outcome.samples, accepted=False)
