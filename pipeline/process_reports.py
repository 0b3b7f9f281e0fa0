"""The questions of a supervisor, put to the processes of a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pipeline.activity import ProducerActivity
from pipeline.cluster import answer
from pipeline.messages import NO_QUEUE, QueueCounts, decode
from pipeline.producer_group import name_of
from pipeline.stall_chain import RankActivity
from pipeline.supervision import ASK_S
from pipeline.workers import Workers
from vime.backends.vllm_utils.client import EngineClient


class ProcessReports:
    """A `Reporting` over actors and engines. `clients` and `fenced` are asked each time anew."""

    def __init__(self, workers: Workers, clients: list[EngineClient], fenced: Callable[[], Mapping[str, str]]) -> None:
        self._workers, self._clients, self.fenced_engines = workers, clients, fenced

    def ask_coordinator(self) -> Awaitable[QueueCounts]:
        """What the coordinator counts, where there is one; nobody waits for one that starts again."""
        if self._workers.queue.actor is None:
            return _nothing_counted()
        return _told(self._workers.queue.actor.counts.remote(), "the queue coordinator", QueueCounts)

    def ask_producers(self) -> list[Awaitable[ProducerActivity]]:
        """What the groups of each are at."""
        producers = self._workers.producers.actors
        return [_told(actor.activity.remote(), name_of(n), ProducerActivity) for n, actor in enumerate(producers)]

    def ask_ranks(self) -> list[Awaitable[RankActivity]]:
        """What the model of each is at."""
        ranks = self._workers.trainers.ranks
        return [_told(actor.activity.remote(), f"trainer rank {n}", RankActivity) for n, actor in enumerate(ranks)]

    def ask_engines(self) -> dict[str, Awaitable[None]]:
        """Whether each samples a token."""
        return {client.address: client.check(ASK_S) for client in self._clients}


async def _nothing_counted() -> QueueCounts:
    return NO_QUEUE


async def _told(reference: Awaitable[Any], process: str, kind: Any) -> Any:
    return decode(await answer(reference, process), kind)
