"""The next batch of a session: waited for, chosen, planned, and recorded before anything is trained on it."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.batch_hooks import BatchHooks
from pipeline.batch_wait import groups_to_wait_for, wait_for_batch
from pipeline.debug.dumps import RolloutDumps
from pipeline.messages import QueueCounts, encode
from pipeline.packing import PackingSettings
from pipeline.plan_settings import plan_settings
from pipeline.planner import BatchPlan, batch_id_of, plan_batch
from pipeline.stages import Stage, StageBoard
from pipeline.step_metrics import StepClock
from pipeline.workers import Workers
from vime.settings.groups import Settings
from vime.utils.kill_points import KillPoint, reach


class BatchPlanning:
    """What the trainer is given is what the queue has on record."""

    def __init__(
        self,
        settings: Settings,
        workers: Workers,
        hooks: BatchHooks,
        dumps: RolloutDumps,
        clock: StepClock,
        stages: StageBoard,
        *,
        report: Callable[[str], None],
        check: Callable[[QueueCounts], None],
        stop_asked: Callable[[], bool],
    ) -> None:
        """While a batch is waited for `report` is told what for, and `check` may refuse to go on."""
        self._settings, self._workers, self._hooks, self._dumps = settings, workers, hooks, dumps
        self._clock, self._stages = clock, stages
        self._report, self._check, self._stop_asked = report, check, stop_asked

    async def next(
        self, rollout_id: int, branch: str, packing: PackingSettings, plan_under: Callable[[], int]
    ) -> BatchPlan | None:
        """None when the user asked to stop meanwhile.

        `plan_under` gives the policy version under which the batch is planned, once its groups are there.
        """
        data = self._settings.data
        self._clock.waits()
        wanted = groups_to_wait_for(data.rollout_batch_size or 0, (data.num_rollout or 0) - rollout_id)
        self._stages.begin(Stage("", rollout_id + 1, groups_wanted=wanted))
        groups = await wait_for_batch(
            self._workers.queue,
            self._workers.stats,
            wanted,
            stall_timeout_s=None,
            report=self._report,
            check=self._check,
            stop_asked=self._stop_asked,
        )
        if groups is None:
            return None
        self._clock.waited()
        self._stages.begin(Stage("is planned", rollout_id + 1))
        chosen, processed = await self._hooks.batch(groups, rollout_id, batch_id_of(branch, rollout_id))
        plan = plan_batch(
            chosen,
            plan_settings(self._settings, packing),
            branch=branch,
            rollout_id=rollout_id,
            policy_version=plan_under(),
            processed=processed,
        )
        reach(KillPoint.BEFORE_PLAN)
        await self._workers.queue.record_plan(plan, encode(plan))
        reach(KillPoint.AFTER_PLAN)
        await self._dumps.save(plan)
        return plan
