"""The rollout producer: leases groups, generates, rewards, publishes, and has them accepted. CPU only, asyncio."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.failed_groups import FailedGroups, Failure, most_telling
from pipeline.group_start import anew, is_done, read_start
from pipeline.messages import AcceptReply, AcceptRequest, LeaseReply, LeaseStatus, ProducerStats, Work
from pipeline.serving_engines import ServingEngines
from storage.checks import EnqueueRequirements, check_sample
from storage.columns import EncodedGroup, encode_group
from storage.contracts import PayloadPool
from storage.summary import GroupSummary, summarize
from storage.writer import GroupWriter, WriteLimits
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import EngineError, GenerationAborted
from vime.rollout.rewards import GroupRewardFunction, RewardFunction, reward_value, score, score_group
from vime.utils.kill_points import KillPoint, reach
from vime.utils.types import Sample

logger = logging.getLogger(__name__)

POLL_S = 0.05
RETRY_S = 1.0


class Generator(Protocol):
    """What fills a sample, by asking an engine or without one."""

    async def generate(self, engine: Any, sample: Sample, *, cache_salt: str | None) -> None: ...


class Teacher(Protocol):
    """What scores a generated sample for on-policy distillation."""

    async def score(self, sample: Sample) -> None: ...


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
        generator: Generator,
        reward: RewardFunction,
        hook_args: Any,
        failed_groups: FailedGroups,
        group_reward: GroupRewardFunction | None = None,
        write_limits: WriteLimits | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        """With `group_reward` that is called once for all members of a group, and `reward` never.

        A generator that needs none gets None in place of an engine where there are no `engines`.
        """
        self._settings, self._queue, self._pool = settings, queue, pool
        self._engines = ServingEngines(engines)
        self._generator, self._reward, self._hook_args = generator, reward, hook_args
        self._group_reward, self._teacher = group_reward, teacher
        self._policy_version = 0
        self._admitting = asyncio.Event()
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: dict[bytes, tuple[Work, asyncio.Task[None]]] = {}
        self._failed = failed_groups
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

    def resume_admission(self, policy_version: int, serving: Collection[str] | None = None) -> None:
        """New requests are made under `policy_version`, by the engines at the addresses `serving` (None: by all)."""
        self._policy_version = policy_version
        if serving is not None:
            self._engines.serve(serving)
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
            failed_samples=dict(self._failed.num_samples_by_reason),
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
            outcome = await self._generate_group(work)
        except GenerationAborted as error:
            self._aborted += 1
            await self._release(work, f"aborted: {error.message}")
            return
        if isinstance(outcome, _Finished):
            self._failures.pop(work.group_index, None)
            self._generated.add(work.lease)
            await self._put(outcome)
        else:
            await self._group_failed(work, outcome)

    async def _put(self, finished: _Finished) -> None:
        """Hand a group to the writer, which may make this wait; that counts as blocked."""
        self._num_putting += 1
        self._note_blocked()
        try:
            reach(KillPoint.BEFORE_PUBLISH)
            await self._writer.put(finished.group, finished.work.lease, finished)
        finally:
            self._num_putting -= 1
            self._note_blocked()
            self._generated.discard(finished.work.lease)

    def _note_blocked(self) -> None:
        self._blocked.set(self._queue_is_full or self._num_putting > 0)

    async def _group_failed(self, work: Work, failures: list[Failure]) -> None:
        """Write letters of the samples that failed, then try the group again or drop it for good.

        An engine's failure says nothing of a sample: it gets a letter only when the group is dropped.
        """
        group_index, cause = work.group_index, most_telling(failures)
        attempts = self._failures[group_index] = self._failures.get(group_index, 0) + 1
        logger.warning("group %d failed, attempt %d (%s): %s", group_index, attempts, cause.reason, cause.error)
        dropping = attempts >= self._settings.max_attempts
        await self._failed.record(work, [f for f in failures if dropping or not isinstance(f.error, EngineError)])
        if dropping:
            await self._queue.drop(group_index, work.lease, cause.reason)
            self._held.pop(work.lease, None)
        else:
            await asyncio.sleep(RETRY_S)
            await self._release(work, str(cause.error))

    async def _release(self, work: Work, reason: str) -> None:
        await self._queue.release(work.group_index, work.lease, reason)
        self._held.pop(work.lease, None)

    async def _generate_group(self, work: Work) -> _Finished | list[Failure]:
        """Generate and score the members together; the first failure cancels the rest.

        What can't be trained or stored fails here, where it costs no other group. Raises `GenerationAborted`.
        """
        start = await asyncio.to_thread(read_start, work, self._pool, self._settings.n_samples_per_prompt)
        samples = [sample if is_done(sample) else anew(sample) for sample in start]
        failures = await self._generate_members([sample for sample in samples if not is_done(sample)])
        failures = failures or await self._score_group(samples)
        return failures or await asyncio.to_thread(self._check_and_encode, work, samples)

    def _check_and_encode(self, work: Work, samples: list[Sample]) -> _Finished | list[Failure]:
        """Takes 0.1 s of processor time for long samples with routes: apart from the loop that keeps requests going."""
        failures = [Failure([s], error) for s in samples if (error := self._fault(s)) is not None]
        if failures:
            return failures
        key = self._settings.reward_key
        try:
            return _Finished(work, samples, self._encode(samples), summarize(samples, reward_key=key))
        except Exception as error:  # the boundary to what user code left in the samples
            return [self._of_one_sample(samples, error)]

    async def _generate_members(self, samples: list[Sample]) -> list[Failure]:
        """Generate and score; what failed. Raises `GenerationAborted` when nothing else went wrong."""
        tasks = [asyncio.create_task(self._generate_sample(sample)) for sample in samples]
        if not tasks:
            return []
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        failures, aborted = [], None
        for sample, task in zip(samples, tasks, strict=True):
            error = None if task.cancelled() else task.exception()
            if isinstance(error, GenerationAborted):
                aborted = error
            elif isinstance(error, Exception):
                failures.append(Failure([sample], error))
        if aborted is not None and not failures:
            raise aborted
        return failures

    async def _score_group(self, samples: list[Sample]) -> list[Failure]:
        """Reward all members by one call, where the settings say so; a failure is that of the whole group."""
        if self._group_reward is None:
            return []
        started = time.monotonic()
        try:
            await score_group(self._group_reward, self._hook_args, samples, timeout_s=self._settings.reward_timeout_s)
        except Exception as error:  # the boundary to what the reward returned
            return [Failure(samples, error)]
        for sample in samples:
            sample.non_generation_time += time.monotonic() - started
        return []

    def _fault(self, sample: Sample) -> Exception | None:
        """Why a generated sample can't be trained on."""
        try:
            check_sample(sample, self._settings.needs)
            reward_value(sample, self._settings.reward_key)
        except Exception as error:  # the boundary to what user code left in the sample
            return error
        return None

    def _encode(self, samples: Sequence[Sample]) -> EncodedGroup:
        routes = self._settings.needs.routes
        return encode_group(
            samples,
            reward_key=self._settings.reward_key,
            sc_dtype=self._settings.sc_dtype,
            num_experts=None if routes is None else routes.num_experts,
        )

    def _of_one_sample(self, samples: list[Sample], error: Exception) -> Failure:
        """The failure to store a group, as that of the one sample that can't be stored by itself, if there is one."""
        for sample in samples:
            try:
                self._encode([sample])
            except Exception as its_error:  # the boundary to what user code left in the sample
                return Failure([sample], its_error)
        return Failure(samples, error)

    async def _generate_sample(self, sample: Sample) -> None:
        await self._admitting.wait()
        engine = self._engines.of_group(sample.group_index or 0)
        salt = f"v{self._policy_version}" if self._settings.salt_by_version else None
        self._count_requests(+1)
        try:
            await self._engines.request(engine, self._generator.generate(engine, sample, cache_salt=salt))
        finally:
            self._count_requests(-1)
        if self._teacher is not None:
            await self._teacher.score(sample)
        if self._group_reward is not None:
            return
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
            reach(KillPoint.AFTER_PUBLISH)
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
        self._spanning += sum(len({version for version, _, _ in sample.version_spans}) > 1 for sample in samples)

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
