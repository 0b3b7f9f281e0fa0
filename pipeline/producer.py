"""The rollout producer: leases groups, generates, rewards, publishes, and has them accepted. CPU only, asyncio."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.group_start import anew, is_done, read_start
from pipeline.messages import AcceptReply, AcceptRequest, LeaseReply, LeaseStatus, ProducerStats, Work
from storage.checks import EnqueueRequirements, check_enqueue
from storage.columns import EncodedGroup, encode_group
from storage.contracts import PayloadPool
from storage.summary import GroupSummary, summarize
from storage.writer import GroupWriter, WriteLimits
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import EngineError, GenerationAborted, RewardError, SampleError
from vime.rollout.generate import SampleGenerator
from vime.rollout.rewards import RewardFunction, reward_value, score
from vime.utils.types import Sample

logger = logging.getLogger(__name__)

POLL_S = 0.05
RETRY_S = 1.0


class QueueClient(Protocol):
    """What a producer needs of the coordinator."""

    async def lease(self, worker_id: str, max_groups: int, policy_version: int) -> LeaseReply: ...
    async def heartbeat(self, leases: list[bytes]) -> list[bool]: ...
    async def accept(self, requests: list[AcceptRequest]) -> list[AcceptReply]: ...
    async def release(self, group_index: int, lease: bytes, reason: str) -> None: ...
    async def drop(self, group_index: int, lease: bytes, reason: str) -> None: ...


@dataclass(frozen=True)
class ProducerSettings:
    """The settings that a producer depends on."""

    worker_id: str
    n_samples_per_prompt: int
    max_groups_in_flight: int
    lease_seconds: float
    max_attempts: int
    reward_timeout_s: float
    reward_key: str | None
    salt_by_version: bool
    needs: EnqueueRequirements
    """What training needs of each sample."""
    sc_dtype: str
    """Stored type of the candidates' log-probabilities."""


@dataclass(frozen=True)
class _Finished:
    """A group in its stored form, on its way to the pool."""

    work: Work
    samples: list[Sample]
    group: EncodedGroup
    summary: GroupSummary


class Producer:
    """Runs until the queue wants no more groups or `stop` is called."""

    def __init__(
        self,
        settings: ProducerSettings,
        queue: QueueClient,
        pool: PayloadPool,
        engines: Sequence[EngineClient],
        generator: SampleGenerator,
        reward: RewardFunction,
        hook_args: Any,
        write_limits: WriteLimits | None = None,
    ) -> None:
        self._settings, self._queue, self._pool = settings, queue, pool
        self._engines, self._generator, self._reward, self._hook_args = engines, generator, reward, hook_args
        self._policy_version = 0
        self._admitting = asyncio.Event()
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: dict[bytes, tuple[Work, asyncio.Task[None]]] = {}
        self._failures: dict[int, int] = {}
        self._writer: GroupWriter[_Finished] = GroupWriter(pool, settings.worker_id, write_limits)
        self._num_putting = 0
        self._generated: set[bytes] = set()
        self._queue_is_full = False
        self._published = 0
        self._samples = 0
        self._tokens = 0
        self._spanning = 0
        self._aborted = 0
        self._stale = 0
        self._requests = 0
        self._started: float | None = None
        self._idle = _Stopwatch()
        self._blocked = _Stopwatch()

    def pause_admission(self) -> None:
        """Start no request until `resume_admission`; running ones go on."""
        self._admitting.clear()

    def resume_admission(self, policy_version: int) -> None:
        """New requests are made under `policy_version`."""
        self._policy_version = policy_version
        if self._started is None:
            self._started = time.monotonic()
            self._idle.set(True)
        self._admitting.set()

    def stop(self) -> None:
        """Lease no more, give unfinished groups back, publish the finished ones; `run` then returns."""
        self._stopping = True
        self._writer.close_input()
        self._admitting.set()

    def stats(self) -> ProducerStats:
        return ProducerStats(
            groups_published=self._published,
            samples_published=self._samples,
            tokens_generated=self._tokens,
            spanning_samples=self._spanning,
            groups_aborted=self._aborted,
            groups_stale=self._stale,
            in_flight_requests=self._requests,
            idle_s=self._idle.total_s(),
            blocked_s=self._blocked.total_s(),
            wall_s=0.0 if self._started is None else time.monotonic() - self._started,
        )

    async def run(self) -> None:
        """Produce until stopped. An exception here is a fault of the producer, not of one sample."""
        loops = [asyncio.create_task(loop()) for loop in (self._lease_loop, self._publish_loop, self._heartbeat_loop)]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for loop in done:
                loop.result()
            await self._give_back_unfinished()
            loops.append(asyncio.create_task(self._all_accepted()))
            done, _ = await asyncio.wait(loops[1:], return_when=asyncio.FIRST_COMPLETED)
            for loop in done:
                loop.result()
        finally:
            for task in [*loops, *self._tasks]:
                task.cancel()
            await asyncio.gather(*loops, *self._tasks, return_exceptions=True)

    async def _lease_loop(self) -> None:
        while not self._stopping:
            self._reap()
            await self._admitting.wait()
            room = self._settings.max_groups_in_flight - len(self._tasks)
            if room <= 0:
                await asyncio.wait(self._tasks, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                continue
            reply = await self._queue.lease(self._settings.worker_id, room, self._policy_version)
            self._queue_is_full = reply.status is not LeaseStatus.WORK
            self._note_blocked()
            for work in reply.work:
                task = asyncio.create_task(self._produce(work))
                self._tasks.add(task)
                self._held[work.lease] = (work, task)
            if not reply.work:
                await asyncio.sleep(POLL_S)

    def _reap(self) -> None:
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.remove(task)
            if not task.cancelled():
                task.result()

    async def _produce(self, work: Work) -> None:
        """One group, from lease to outbox. A failed group goes back to the queue, or is set aside at last."""
        try:
            finished = await self._generate_group(work)
        except GenerationAborted as error:
            self._aborted += 1
            await self._release(work, f"aborted: {error.message}")
            return
        except (EngineError, RewardError, SampleError) as error:
            await self._group_failed(work, error)
            return
        self._failures.pop(work.group_index, None)
        self._generated.add(work.lease)
        await self._put(finished)

    async def _put(self, finished: _Finished) -> None:
        """Hand a group to the writer, which may make this wait; that counts as blocked."""
        self._num_putting += 1
        self._note_blocked()
        try:
            await self._writer.put(finished.group, finished.work.lease, finished)
        finally:
            self._num_putting -= 1
            self._note_blocked()
            self._generated.discard(finished.work.lease)

    def _note_blocked(self) -> None:
        self._blocked.set(self._queue_is_full or self._num_putting > 0)

    async def _group_failed(self, work: Work, error: EngineError | RewardError | SampleError) -> None:
        group_index = work.group_index
        attempts = self._failures[group_index] = self._failures.get(group_index, 0) + 1
        logger.warning("group %d failed, attempt %d: %s", group_index, attempts, error)
        if attempts >= self._settings.max_attempts:
            reason = {EngineError: "engine", RewardError: "reward", SampleError: "sample"}
            name = next(label for kind, label in reason.items() if isinstance(error, kind))
            await self._queue.drop(group_index, work.lease, name)
            self._held.pop(work.lease, None)
        else:
            await asyncio.sleep(RETRY_S)
            await self._release(work, str(error))

    async def _release(self, work: Work, reason: str) -> None:
        await self._queue.release(work.group_index, work.lease, reason)
        self._held.pop(work.lease, None)

    async def _generate_group(self, work: Work) -> _Finished:
        """Generate and score the members together; the first failure cancels the rest.

        What can't be trained or stored fails here, where it costs no other group.
        """
        start = await asyncio.to_thread(read_start, work, self._pool, self._settings.n_samples_per_prompt)
        samples = [sample if is_done(sample) else anew(sample) for sample in start]
        try:
            async with asyncio.TaskGroup() as group:
                for sample in samples:
                    if not is_done(sample):
                        group.create_task(self._generate_sample(sample))
        except* (EngineError, RewardError, SampleError) as errors:
            raise _first(errors) from errors
        key = self._settings.reward_key
        check_enqueue(samples, self._settings.needs)
        for sample in samples:
            reward_value(sample, key)
        routes = self._settings.needs.routes
        encoded = encode_group(
            samples,
            reward_key=key,
            sc_dtype=self._settings.sc_dtype,
            num_experts=None if routes is None else routes.num_experts,
        )
        return _Finished(work, samples, encoded, summarize(samples, reward_key=key))

    async def _generate_sample(self, sample: Sample) -> None:
        await self._admitting.wait()
        engine = self._engines[(sample.group_index or 0) % len(self._engines)]
        salt = f"v{self._policy_version}" if self._settings.salt_by_version else None
        self._count_requests(+1)
        try:
            await self._generator.generate(engine, sample, cache_salt=salt)
        finally:
            self._count_requests(-1)
        started = time.monotonic()
        await score(
            self._reward,
            self._hook_args,
            sample,
            timeout_s=self._settings.reward_timeout_s,
            key=self._settings.reward_key,
        )
        sample.non_generation_time += time.monotonic() - started

    def _count_requests(self, change: int) -> None:
        self._requests += change
        self._idle.set(self._requests == 0)

    async def _publish_loop(self) -> None:
        """Have accepted what became durable, all of one transaction together."""
        async for batch in self._writer.batches():
            replies = await self._queue.accept(
                [AcceptRequest(finished.work.lease, ref, finished.summary) for finished, ref in batch]
            )
            for (finished, _), reply in zip(batch, replies, strict=True):
                self._held.pop(finished.work.lease, None)
                self._count_accepted(finished.samples, accepted=reply.position is not None)

    async def _all_accepted(self) -> None:
        """Until every finished group is with the queue."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._writer.join()

    def _count_accepted(self, samples: list[Sample], *, accepted: bool) -> None:
        if not accepted:
            self._stale += 1
            return
        self._published += 1
        self._samples += len(samples)
        self._tokens += sum(sample.response_length for sample in samples)
        self._spanning += sum(len(sample.version_spans) > 1 for sample in samples)

    async def _heartbeat_loop(self) -> None:
        while True:
            await asyncio.sleep(max(0.1, self._settings.lease_seconds / 3))
            held = list(self._held)
            for alive, lease in zip(await self._queue.heartbeat(held), held, strict=True):
                if not alive and lease in self._held:
                    # The group belongs to somebody else now; a result of ours would be refused.
                    self._held.pop(lease)[1].cancel()

    async def _give_back_unfinished(self) -> None:
        unfinished = [
            (work, task) for work, task in self._held.values() if not task.done() and work.lease not in self._generated
        ]
        for _, task in unfinished:
            task.cancel()
        await asyncio.gather(*(task for _, task in unfinished), return_exceptions=True)
        for work, _ in unfinished:
            if work.lease in self._held:
                await self._release(work, "producer stopped")


class _Stopwatch:
    """Seconds spent in a state that is entered and left."""

    def __init__(self, *, running: bool = False) -> None:
        self._total = 0.0
        self._since = time.monotonic() if running else None

    def set(self, running: bool) -> None:
        now = time.monotonic()
        if self._since is not None:
            self._total += now - self._since
        self._since = now if running else None

    def total_s(self) -> float:
        return self._total + (time.monotonic() - self._since if self._since is not None else 0.0)


def _first(errors: BaseExceptionGroup[Any]) -> BaseException:
    """The most telling leaf of a group: an abort hides behind nothing, other errors come first."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = list(errors.exceptions)
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((leaf for leaf in leaves if not isinstance(leaf, GenerationAborted)), leaves[0])
