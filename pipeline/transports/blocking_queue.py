"""The coordinator's actor for code without an event loop."""

from __future__ import annotations

from typing import Any

from pipeline.messages import AcceptReply, AcceptRequest, LeaseReply, decode, encode
from pipeline.transports.ray_parts import answer_of
from storage.queue_types import GroupReturn


class RayBlockingQueue:
    """A `BlockingQueue` over the coordinator's actor; may be used from several threads."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    def lease(self, worker_id: str, max_groups: int, policy_version: int) -> LeaseReply:
        return decode(answer_of(self._coordinator.lease.remote(worker_id, max_groups, policy_version)), LeaseReply)

    def heartbeat(self, leases: list[bytes]) -> list[bool]:
        alive: list[bool] = answer_of(self._coordinator.heartbeat.remote(leases))
        return alive

    def accept(self, requests: list[AcceptRequest]) -> list[AcceptReply]:
        return decode(answer_of(self._coordinator.accept.remote(encode(requests))), list[AcceptReply])

    def yield_groups(self, returns: list[GroupReturn]) -> list[bool]:
        done: list[bool] = answer_of(self._coordinator.yield_groups.remote(encode(returns)))
        return done

    def release(self, group_index: int, lease: bytes, reason: str) -> None:
        answer_of(self._coordinator.release.remote(group_index, lease, reason))

    def drop(self, group_index: int, lease: bytes, reason: str) -> None:
        answer_of(self._coordinator.drop.remote(group_index, lease, reason))
