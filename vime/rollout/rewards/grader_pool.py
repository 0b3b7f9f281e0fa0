"""Processes that grade: one that takes too long, too much memory, or dies is replaced, and only its sample fails."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import msgspec
from pebble import ProcessExpired, ProcessPool

from vime.errors import RewardError
from vime.rollout.rewards.grader_worker import OUT_OF_MEMORY, GradeReply, GradeRequest, grade_bytes, prepare_worker

_PRELOADED = "vime.rollout.rewards.grader_worker"


class GraderPool:
    """Up to `num_workers` gradings at once, each for at most `timeout_s` from its beginning, in `memory_bytes` each.

    Workers are started by `start`, or else when the first grading comes. Close it to end them.
    """

    def __init__(
        self, *, num_workers: int, timeout_s: float, memory_bytes: int, settings: bytes, preload: Sequence[str] = ()
    ) -> None:
        """`settings` are encoded ones, from which workers make the `args` of the user's functions.

        Modules in `preload` are imported once, by the process from which workers are forked, so that replacing a worker
        takes no time.
        """
        self._preload = [_PRELOADED, *preload]
        self._num_workers, self._timeout_s, self._memory_bytes = num_workers, timeout_s, memory_bytes
        self._settings = settings
        self._starting: asyncio.Task[ProcessPool] | None = None

    def start(self) -> asyncio.Task[ProcessPool]:
        """Begin to start the workers, unless that is done. Nobody has to wait for the task that is returned."""
        if self._starting is None:
            self._starting = asyncio.create_task(asyncio.to_thread(self._start))
        return self._starting

    async def grade(self, request: GradeRequest) -> GradeReply:
        """The reply of a worker. When this is cancelled, its worker is ended.

        Raises:
            RewardError: the grader failed, took too long or too much memory, or its process died; or the request
                holds something that can't be sent.
        """
        try:
            content = msgspec.msgpack.encode(request)
        except TypeError as error:
            raise RewardError(
                f"the sample can't be sent to the process that grades: {error}.",
                next_step="Leave only plain values in label and metadata, or make the reward an `async def`.",
                reason="reward_unsendable",
            ) from error
        return _checked(msgspec.msgpack.decode(await self._run(content), type=GradeReply))

    async def close(self) -> None:
        """End the workers, whatever they are at."""
        starting, self._starting = self._starting, None
        if starting is not None:
            await asyncio.to_thread(_stop, await starting)

    async def _run(self, content: bytes) -> bytes:
        starting = self.start()
        pool = await asyncio.shield(starting)
        try:
            # Not in a thread: between its beginning and its end a cancellation would lose the future.
            future = pool.schedule(grade_bytes, args=[content], timeout=self._timeout_s)
            reply: bytes = await asyncio.wrap_future(future)
            return reply
        except TimeoutError as error:
            raise RewardError(
                f"the reward took longer than {self._timeout_s:g} s.",
                next_step="Raise --reward-timeout if graders need longer.",
                reason="reward_timeout",
            ) from error
        except ProcessExpired as error:
            raise self._died(error.exitcode) from error
        except (BrokenProcessPool, RuntimeError) as error:
            self._starting = None if self._starting is starting else self._starting  # the next one starts a new pool
            raise RewardError(f"the processes that grade broke down: {error}.", reason="reward_process_died") from error

    def _start(self) -> ProcessPool:
        """Takes a second, most of it for imports."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(self._preload)
        pool = ProcessPool(
            max_workers=self._num_workers,
            initializer=prepare_worker,
            initargs=[self._memory_bytes, self._settings],
            context=context,
        )
        pool.schedule(os.getpid)  # the first task starts the workers
        return pool

    def _died(self, exit_code: int) -> RewardError:
        if exit_code == OUT_OF_MEMORY:
            return RewardError(
                f"the reward wanted more than {self._memory_bytes / 2**30:g} GiB of memory.",
                next_step="Raise --reward-memory-gib if graders need more.",
                reason="reward_memory",
            )
        how = f"by signal {-exit_code}" if exit_code < 0 else f"with exit status {exit_code}"
        return RewardError(f"the process that graded it ended {how}.", reason="reward_process_died")


def _checked(reply: GradeReply) -> GradeReply:
    if reply.failure:
        raise RewardError(reply.failure, next_step=reply.next_step, reason=reply.reason)
    return reply


def _stop(pool: Any) -> None:
    pool.stop()
    pool.join()
