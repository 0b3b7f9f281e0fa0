"""Functions of the user's own on the batch that is about to be planned, each in a thread and with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

from pipeline.buffer_filter import FLAG as BUFFER_FILTER
from pipeline.buffer_filter import take_groups
from pipeline.planner import ProcessedRewards, select_groups
from pipeline.reward_post_process import FLAG as POST_PROCESS
from pipeline.reward_post_process import process_rewards
from pipeline.sample_conversion import FLAG as CONVERT
from pipeline.sample_conversion import Conversion, convert_batch
from pipeline.sample_filter import FLAG as SAMPLE_FILTER
from pipeline.sample_filter import filter_samples
from storage.contracts import PayloadPool
from storage.memory_pool import MemoryPool
from storage.queue_types import AcceptedGroup
from storage.refs import GroupRef
from vime.errors import RewardError
from vime.settings.groups import Settings
from vime.settings.import_paths import load_function
from vime.settings.rules.quantities import is_stream

_Result = TypeVar("_Result")


class BatchHooks:
    """Chooses the groups of a batch and lets the user's functions change what is trained of them.

    What is converted lies in the pool until `trained` says that it isn't needed any more.
    """

    def __init__(
        self,
        settings: Settings,
        hook_args: Callable[[], Any],
        open_pool: Callable[[], PayloadPool],
        conversion: Conversion | None = None,
    ) -> None:
        """`conversion` is needed where samples are converted."""
        self._settings, self._hook_args, self._open_pool, self._conversion = settings, hook_args, open_pool, conversion
        self._converted: list[GroupRef] = []

    async def batch(
        self, waiting: Sequence[AcceptedGroup], rollout_id: int, batch_id: str
    ) -> tuple[Sequence[AcceptedGroup], ProcessedRewards | None]:
        """The groups to train, and their rewards where a function has made them. Raises `RewardError`."""
        rollout, count = self._settings.rollout, self._settings.data.rollout_batch_size or 0
        groups = await self._taken(waiting, rollout_id, count)
        if rollout.rollout_sample_filter_path is not None and is_stream(self._settings):
            groups = await self._call(SAMPLE_FILTER, rollout.rollout_sample_filter_path, groups, filter_samples)
        if rollout.custom_reward_post_process_path is not None:
            path = rollout.custom_reward_post_process_path
            return groups, await self._call(POST_PROCESS, path, groups, process_rewards)
        if rollout.custom_convert_samples_to_train_data_path is not None and self._conversion is not None:
            path = rollout.custom_convert_samples_to_train_data_path
            convert = partial(convert_batch, conversion=self._conversion, batch_id=batch_id)
            groups, rewards = await self._call(CONVERT, path, groups, convert)
            self._converted = [group.ref for group in groups]
            return groups, rewards
        return groups, None

    async def trained(self) -> None:
        """The batch is trained: what is kept in memory of its conversion goes."""
        converted, self._converted = self._converted, []
        if converted:
            await asyncio.to_thread(self._release, converted)

    async def _taken(self, waiting: Sequence[AcceptedGroup], rollout_id: int, count: int) -> list[AcceptedGroup]:
        path = self._settings.data.buffer_filter_path
        if path is None:
            return select_groups(waiting, count)
        return await self._call(BUFFER_FILTER, path, waiting, partial(take_groups, rollout_id=rollout_id, count=count))

    async def _call(
        self,
        flag: str,
        path: str,
        groups: Sequence[AcceptedGroup],
        call: Callable[[Sequence[AcceptedGroup], PayloadPool, Any, Any], _Result],
    ) -> _Result:
        """What `call(groups, pool, function, args)` makes of groups with a function of the user's own."""
        timeout_s = self._settings.rollout.reward_timeout

        def process() -> _Result:
            function = load_function(flag, path)
            with closing(self._open_pool()) as pool:
                return call(groups, pool, function, self._hook_args())

        try:
            return await asyncio.wait_for(asyncio.to_thread(process), timeout_s)
        except TimeoutError as error:
            raise RewardError(
                f"{flag} took longer than {timeout_s:g} s.", next_step="Raise --reward-timeout if it needs longer."
            ) from error

    def _release(self, refs: Sequence[GroupRef]) -> None:
        with closing(self._open_pool()) as pool:
            if isinstance(pool, MemoryPool):
                pool.release(refs)
