"""--debug-rollout-only: engines, producers and queue without a trainer; the engines keep their first weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from pipeline.batch_wait import wait_for_batch
from pipeline.cluster import Cluster
from pipeline.coordinator_config import CoordinatorConfig
from pipeline.debug.dumps import RolloutDumps
from pipeline.failed_fraction import stop_when_too_many_failed
from pipeline.interrupt import Ending, Interrupts
from pipeline.messages import QueueCounts, encode
from pipeline.packing import PackingSettings
from pipeline.plan_settings import plan_settings
from pipeline.planner import plan_batch
from pipeline.pool_wiring import open_pool
from pipeline.progress import ProgressView
from pipeline.run_folder import RunFolder
from pipeline.workers import Workers
from recovery.branch import Branch, append_branch
from vime.backends.vllm_utils.protocol import START_VERSION
from vime.settings.groups import Settings


def generation_alone(settings: Settings) -> Settings:
    """The same job without trainer. An engine that dies ends it: there is nobody who could give a new one weights.

    For the same reason no engine outlives it.
    """
    return dataclasses.replace(
        settings,
        cluster=settings.cluster.without_trainer(),
        engine=dataclasses.replace(settings.engine, use_fault_tolerance=False),
        queue=dataclasses.replace(settings.queue, rollout_session_id=None),
    )


class RolloutOnlySession:
    """Generates --num-rollout batches and dumps them.

    No commit is made, so a later run in the same folder trains all that was generated.
    """

    def __init__(
        self,
        settings: Settings,
        folder: RunFolder,
        config: CoordinatorConfig,
        cluster: Cluster,
        view: ProgressView,
        interrupts: Interrupts,
    ) -> None:
        self._settings, self._folder, self._config = settings, folder, config
        self._view, self._interrupts = view, interrupts
        self._workers = Workers(settings, folder, cluster)
        self._dumps = RolloutDumps(
            settings.debug.rollout_data_template, lambda: open_pool(settings, self._workers.queue.actor), view.note
        )

    async def run(self) -> Ending:
        """Raises `TooManyFailuresError`."""
        workers, last = self._workers, self._settings.data.num_rollout or 0
        try:
            await workers.queue.start(self._config)
            at_start = await workers.queue.identity()
            self._view.note(f"At start: {at_start}")
            check = partial(stop_when_too_many_failed, self._settings, self._folder.root, at_start)
            await workers.start_routers()
            addresses = await workers.engines.start(self._view.waiting)
            await workers.start_producers()
            append_branch(self._folder.root, Branch(self._config.branch, None, ".", START_VERSION))
            await workers.record_processes()
            await workers.resume_admission(START_VERSION, addresses)
            with self._interrupts.finishing_steps():
                for rollout_id in range(last):
                    if not await workers.guarded(self._rollout(rollout_id, check)):
                        break
                failed = await workers.stop_producers()
            if failed is not None:
                raise failed
            self._view.note(
                f"At end: {await workers.queue.identity()}; nothing is committed, a run in this folder trains it."
            )
            return Ending.INTERRUPTED if self._interrupts.stop_asked else Ending.DONE
        finally:
            await workers.stop()

    async def _rollout(self, rollout_id: int, check: Callable[[QueueCounts], None]) -> bool:
        """Wait for a batch, dump it and call it done; False when the user asked to stop."""
        workers, data = self._workers, self._settings.data
        groups = await wait_for_batch(
            workers.queue,
            workers.stats,
            data.rollout_batch_size or 0,
            stall_timeout_s=self._settings.queue.stall_timeout,
            report=self._view.waiting,
            check=check,
            stop_asked=lambda: self._interrupts.stop_asked,
        )
        if groups is None:
            return False
        plan = plan_batch(
            groups,
            plan_settings(self._settings, PackingSettings(num_ranks=1)),
            branch=self._config.branch,
            rollout_id=rollout_id,
            policy_version=START_VERSION,
        )
        await workers.queue.record_plan(plan, encode(plan))
        await self._dumps.save(plan)
        await workers.queue.training_completed(plan)
        await workers.queue.keep_version(START_VERSION)
        counts = await workers.queue.counts()
        rewards = [sample.reward for sample in plan.samples]
        self._view.note(
            f"rollout {rollout_id + 1}/{data.num_rollout}  reward {sum(rewards) / len(rewards):.3f}  "
            f"{len(plan.samples)} samples, {counts.pending} groups wait"
        )
        check(counts)
        return True
