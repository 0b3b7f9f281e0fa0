"""The rewards of a run: which one a sample gets, and the processes, the thread and the connections behind them."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any

import msgspec

from vime.errors import RewardError, SettingsError
from vime.rollout.rewards.answers import Answer
from vime.rollout.rewards.grader_pool import GraderPool
from vime.rollout.rewards.grader_worker import GradeRequest
from vime.rollout.rewards.graders import BOXED, BUILT_IN, GRADERS, RANDOM, REMOTE, as_graded, module_of
from vime.rollout.rewards.judge import Judge, JudgeSettings
from vime.rollout.rewards.own_functions import is_async, sendable
from vime.rollout.rewards.scoring import TimedReward, answer_in_time, place_of
from vime.rollout.rewards.side_loop import SideLoop
from vime.settings.groups import Settings
from vime.settings.import_paths import load_function
from vime.utils.types import Sample

_FLAG = "--custom-rm-path"
_MOST_WORKERS = 4


class Rewards:
    """Rewards as the settings name them. Close them, or use `async with`.

    A sample's own `custom_rm_path` goes first, then --custom-rm-path, then `metadata["rm_type"]`, then --rm-type.
    Built-in graders and the user's plain functions run in processes of a pool, the user's coroutines in a loop of
    their own, and a remote judge is asked from the caller's loop. So no reward holds up the caller.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises `SettingsError`: an unknown name, or a path that can't be imported."""
        rollout = settings.rollout
        self._rm_type, self._custom_path, self._url = rollout.rm_type, rollout.custom_rm_path, rollout.rm_url
        self._timeout_s, plain = rollout.reward_timeout, (self._rm_type or "").removeprefix(BOXED)
        if self._custom_path is not None:
            load_function(_FLAG, self._custom_path)
        elif plain not in BUILT_IN:
            raise SettingsError(
                f"--rm-type is {self._rm_type!r}, allowed: {', '.join(sorted(BUILT_IN))}, each also as boxed_NAME.",
                next_step="Choose one of these or give --custom-rm-path.",
            )
        self._pool = GraderPool(
            num_workers=rollout.reward_workers or min(_MOST_WORKERS, os.cpu_count() or 1),
            timeout_s=self._timeout_s,
            memory_bytes=round(rollout.reward_memory_gib * 2**30),
            settings=msgspec.msgpack.encode(settings),
            preload=[module_of(plain)] if self._custom_path is None and plain in GRADERS else [],
        )
        self._judge: Judge | None = None
        self._judge_settings = JudgeSettings(
            url=self._url or "",
            max_concurrency=rollout.reward_concurrency,
            timeout_s=self._timeout_s,
            proxy=rollout.http_proxy,
        )
        self._side = SideLoop("rewards")

    @property
    def of_sample(self) -> TimedReward:
        """`async f(args, sample)`."""
        return _OfSample(self)

    @property
    def of_group(self) -> TimedReward:
        """`async f(args, samples)`: the user's function once for all; where there is none, each sample by itself."""
        return _OfGroup(self)

    def start(self) -> None:
        """Begin to start the processes that grade, where the settings name a reward that needs them.

        To be called in an event loop. Without it they start with the first sample, whose reward then seems to be slow.
        """
        if self._custom_path is not None:
            grades_here = not is_async(load_function(_FLAG, self._custom_path))
        else:
            grades_here = (self._rm_type or "").removeprefix(BOXED) in GRADERS
        if grades_here:
            self._pool.start()

    async def close(self) -> None:
        """End what still runs."""
        self._side.close()
        if self._judge is not None:
            await self._judge.close()
        await self._pool.close()

    async def __aenter__(self) -> Rewards:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def grade_sample(self, args: Any, sample: Sample) -> Any:
        """A sample's reward, not yet checked. Raises `RewardError`."""
        path = sample.custom_rm_path or self._custom_path
        if path is not None:
            return await self._by_function(path, args, [sample], place_of(sample), group=False)
        name = sample.metadata.get("rm_type") or self._rm_type
        return await self._by_name(name, sample)

    async def grade_group(self, args: Any, samples: list[Sample]) -> Any:
        """Rewards of all samples of a group, not yet checked. Raises `RewardError`."""
        if self._custom_path is None:
            return await _all_of(self.grade_sample, args, samples)
        return await self._by_function(self._custom_path, args, samples, f"group {samples[0].group_index}", group=True)

    async def _by_name(self, name: Any, sample: Sample) -> Any:
        plain = str(name).removeprefix(BOXED)
        if plain not in BUILT_IN:
            raise RewardError(
                f'metadata["rm_type"] is {name!r}, allowed: {", ".join(sorted(BUILT_IN))}, each also as boxed_NAME.',
                next_step="Correct the record.",
                reason="reward_unknown_type",
            )
        answer = Answer(sample.response, sample.label, sample.metadata, sample.prompt)
        if plain == RANDOM:
            return float(random.randint(0, 1))
        if plain == REMOTE:
            return await self._asked().grade(as_graded(name, answer))
        return (await self._pool.grade(GradeRequest(grader=name, answer=answer))).value

    def _asked(self) -> Judge:
        if self._url is None:
            raise RewardError(
                'metadata["rm_type"] is "remote_rm" without --rm-url, allowed: both.',
                next_step="Give --rm-url http://HOST:PORT/PATH.",
                reason="reward_unknown_type",
            )
        if self._judge is None:
            self._judge = Judge(self._judge_settings)
        return self._judge

    async def _by_function(self, path: str, args: Any, samples: Sequence[Sample], where: str, *, group: bool) -> Any:
        try:
            function = load_function(_FLAG, path)
        except SettingsError as error:
            raise RewardError(error.message, next_step=error.next_step, reason="reward_unknown_type") from error
        if not is_async(function):
            return await self._in_process(path, samples, group=group)
        work = self._side.run(function(args, list(samples) if group else samples[0]))
        try:
            return await answer_in_time(work, where, self._timeout_s)
        except RewardError as error:
            if error.reason == "reward_timeout":
                await self._side.replace_if_stuck()
            raise

    async def _in_process(self, path: str, samples: Sequence[Sample], *, group: bool) -> Any:
        reply = await self._pool.grade(
            GradeRequest(function=path, samples=[sendable(sample) for sample in samples], group=group)
        )
        for sample, metadata in zip(samples, reply.metadata, strict=True):
            sample.metadata = metadata
        return reply.value


class _OfSample(TimedReward):
    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards

    async def __call__(self, args: Any, scored: Any) -> Any:
        return await self._rewards.grade_sample(args, scored)


class _OfGroup(TimedReward):
    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards

    async def __call__(self, args: Any, scored: Any) -> Any:
        return await self._rewards.grade_group(args, scored)


async def _all_of(
    grade: Callable[[Any, Sample], Coroutine[Any, Any, Any]], args: Any, samples: Sequence[Sample]
) -> list[Any]:
    """Every sample by itself, all at once; the first failure ends the others."""
    tasks = [asyncio.create_task(grade(args, sample)) for sample in samples]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
