"""The queue as a data source for rollout functions of the user's own: groups of samples out, groups of samples back."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec

from pipeline.group_stamps import lease_of, stamp_accepted, stamp_leased, unstamped
from pipeline.group_start import is_done, oldest_of, read_start
from pipeline.lease_keeper import LeaseKeeper
from pipeline.messages import AcceptReply, AcceptRequest, LeaseReply, LeaseStatus, Work
from storage.columns import EncodedGroup
from storage.contracts import PayloadPool
from storage.files import make_folder, write_atomically
from storage.queue_types import GroupReturn, Stage
from storage.summary import summarize
from vime.errors import RestoreError, SampleError
from vime.utils.types import Sample

logger = logging.getLogger(__name__)

MAX_GROUPS_PER_CALL = 64
POLL_S = 0.05
_STATE_VERSION = 1

Group = list[Sample]


class BlockingQueue(Protocol):
    """The coordinator, for code without an event loop."""

    def lease(self, worker_id: str, max_groups: int, policy_version: int) -> LeaseReply: ...
    def heartbeat(self, leases: list[bytes]) -> list[bool]: ...
    def accept(self, requests: list[AcceptRequest]) -> list[AcceptReply]: ...
    def yield_groups(self, returns: list[GroupReturn]) -> list[bool]: ...
    def release(self, group_index: int, lease: bytes, reason: str) -> None: ...
    def drop(self, group_index: int, lease: bytes, reason: str) -> None: ...


@dataclass(frozen=True)
class DataSourceSettings:
    """What a data source depends on."""

    worker_id: str
    branch: str
    num_prompts: int
    """Prompts in one epoch."""
    n_samples_per_prompt: int
    lease_seconds: float
    state_folder: Path
    """Where `save` writes."""
    reward_key: str | None = None


class _State(msgspec.Struct, frozen=True):
    """A file of `save`."""

    version: int
    metadata: dict[str, Any]


class QueueDataSource:
    """Leases groups, keeps the leases alive, and gives the groups back: to be trained, to be gone on with, or dropped.

    The samples of a group carry its lease (`_queue_lease`); samples that a hook makes inherit it from the others of
    their group. Nothing is kept here: what was given back may be leased by anybody next. Use with `with`, or close it.
    """

    def __init__(
        self,
        queue: BlockingQueue,
        pool: PayloadPool,
        settings: DataSourceSettings,
        *,
        check: Callable[[Sequence[Sample]], None],
        encode: Callable[[Sequence[Sample]], EncodedGroup],
        policy_version: Callable[[], int] = lambda: 0,
    ) -> None:
        """`check` raises `SampleError` for a group that can't be trained, `encode` for one that can't be stored.

        `policy_version` says under which version new requests are made now, for `--max-staleness`.
        """
        self._queue, self._pool, self._settings, self._check, self._encode = queue, pool, settings, check, encode
        self._keeper = LeaseKeeper(queue.heartbeat, settings.lease_seconds)
        self._ending = threading.Event()
        self.metadata: dict[str, Any] = {}
        """The user's own; `save` keeps it, `load` brings it back."""
        self._policy_version = policy_version

    @property
    def policy_version(self) -> int:
        """Version under which new requests are made now."""
        return self._policy_version()

    def get_samples(self, num_samples: int) -> list[Group]:
        """`num_samples` groups: completed ones first, then partial ones, then prompts.

        Waits for the first one. Fewer than asked for when the queue is full, so that training must go on first, or at
        its end; none at the end. Raises what the heartbeats failed with.
        """
        groups: list[Group] = []
        while len(groups) < num_samples and not self._ending.is_set():
            self._keeper.check()
            wanted = min(MAX_GROUPS_PER_CALL, num_samples - len(groups))
            reply = self._queue.lease(self._settings.worker_id, wanted, self.policy_version)
            for work in reply.work:
                self._keeper.add(work.lease, work.group_index)
            groups += [self._read(work) for work in reply.work]
            if reply.status is LeaseStatus.DONE or (groups and not reply.work):
                break
            if not reply.work:
                self._ending.wait(POLL_S)
        return groups

    def end(self) -> None:
        """Give out no more groups, and have a call that waits for some return."""
        self._ending.set()

    def add_samples(self, groups: Sequence[Group]) -> list[bool]:
        """Give groups back unfinished or finished, for anybody to go on with; for each whether it was still ours.

        Groups with a response become what their next attempt starts from; those without one, and those whose samples
        can't be stored as they are, go back as they were leased. Raises `SampleError` for a group without a lease or
        with two.
        """
        leases = [lease_of(group) for group in groups]
        done = [True] * len(groups)
        storable: list[tuple[int, EncodedGroup]] = []
        for number, (group, lease) in enumerate(zip(groups, leases, strict=True)):
            try:
                encoded = self._encoded(group) if any(sample.response_length for sample in group) else None
            except SampleError as error:
                logger.warning("group %s goes back as it was leased: %s", group[0].group_index, error)
                encoded = None
            if encoded is not None:
                storable.append((number, encoded))
            else:
                self._release(group[0].group_index or 0, lease, "given back unused")
        for start in range(0, len(storable), MAX_GROUPS_PER_CALL):
            part = storable[start : start + MAX_GROUPS_PER_CALL]
            refs = self._publish([(encoded, leases[number]) for number, encoded in part])
            returns = [
                GroupReturn(leases[number], ref, stage_of(groups[number]), oldest_of(groups[number]))
                for (number, _), ref in zip(part, refs, strict=True)
            ]
            for (number, _), went_back in zip(part, self._queue.yield_groups(returns), strict=True):
                done[number] = went_back
        self._keeper.end(leases)
        return done

    def accept_samples(self, groups: Sequence[Group]) -> list[int | None]:
        """Hand finished groups to the trainer; position of each in the queue, None when its lease had expired.

        A sample then knows its position as `_queue_receipt`. Raises `SampleError` for a sample that can't be trained.
        """
        leases = [lease_of(group) for group in groups]
        for group in groups:
            self._check(group)
        positions: list[int | None] = []
        for start in range(0, len(groups), MAX_GROUPS_PER_CALL):
            part = range(start, min(start + MAX_GROUPS_PER_CALL, len(groups)))
            refs = self._publish([(self._encoded(groups[number]), leases[number]) for number in part])
            requests = [
                AcceptRequest(leases[number], ref, summarize(groups[number], reward_key=self._settings.reward_key))
                for number, ref in zip(part, refs, strict=True)
            ]
            positions += [reply.position for reply in self._queue.accept(requests)]
        for group, position in zip(groups, positions, strict=True):
            stamp_accepted(group, position)
        self._keeper.end(leases)
        return positions

    def drop_samples(self, groups: Sequence[Group], reason: str) -> None:
        """Set groups aside for good, counted under `reason` (a filter's, for example)."""
        for group in groups:
            lease = lease_of(group)
            self._queue.drop(group[0].group_index or 0, lease, reason)
            self._keeper.end([lease])

    def save(self, rollout_id: int) -> None:
        """Keep `metadata`. The place in the prompts is the queue's own, and part of every commit."""
        make_folder(self._settings.state_folder)
        write_atomically(self._state_path(rollout_id), msgspec.json.encode(_State(_STATE_VERSION, self.metadata)))

    def load(self, rollout_id: int | None = None) -> None:
        """Bring `metadata` back as it was saved for a rollout; None: nothing was saved yet.

        Raises `RestoreError` when there is no such file, or it can't be read.
        """
        if rollout_id is None:
            return
        path = self._state_path(rollout_id)
        try:
            self.metadata = msgspec.json.decode(path.read_bytes(), type=_State).metadata
        except (OSError, msgspec.MsgspecError) as error:
            raise RestoreError(
                f"{path}: the data source's state can't be read ({error}).",
                next_step="Resume from a rollout that it was saved for.",
            ) from error

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return self._settings.num_prompts

    def close(self) -> None:
        """Give back what is still leased, and stop the heartbeats."""
        self._keeper.close()
        for lease, group_index in self._keeper.held().items():
            self._release(group_index, lease, "data source closed")
        self._pool.close()

    def __enter__(self) -> QueueDataSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, work: Work) -> Group:
        """The samples of a leased group, each with its stamps."""
        group = read_start(work, self._pool, self._settings.n_samples_per_prompt)
        stamp_leased(group, work, self._settings.branch)
        return group

    def _encoded(self, group: Group) -> EncodedGroup:
        """A group as it is stored: with the origin of its new tokens, without what belongs to the lease."""
        return self._encode([unstamped(sample, self._settings.branch) for sample in group])

    def _publish(self, items: Sequence[tuple[EncodedGroup, bytes]]) -> list[Any]:
        submission_id = f"{self._settings.worker_id}:{uuid.uuid4().hex}"
        return list(self._pool.publish_groups(items, submission_id=submission_id))

    def _release(self, group_index: int, lease: bytes, reason: str) -> None:
        self._queue.release(group_index, lease, reason)
        self._keeper.end([lease])

    def _state_path(self, rollout_id: int) -> Path:
        return self._settings.state_folder / f"data_source_{rollout_id}.json"


def stage_of(group: Sequence[Sample]) -> Stage:
    """Completed when all members are finished and rewarded, partial when any has a response, fresh otherwise."""
    if all(map(is_done, group)):
        return Stage.COMPLETED
    return Stage.PARTIAL if any(sample.response_length for sample in group) else Stage.FRESH
