"""The loop of a session: wait - plan - train - commit - publish, until the last rollout or the user's wish."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pipeline.batch_hooks import BatchHooks
from pipeline.batch_planning import BatchPlanning
from pipeline.commits import Commits
from pipeline.debug.dumps import RolloutDumps
from pipeline.due_work import due_after
from pipeline.engine_return import engines_brought_back
from pipeline.evaluation.session import Evaluations
from pipeline.failed_fraction import stop_when_too_many_failed
from pipeline.interrupt import Interrupts
from pipeline.memory_turns import MemoryTurns
from pipeline.messages import QueueCounts, TrainReport, encode
from pipeline.planner import BatchPlan
from pipeline.progress import ProgressView
from pipeline.publication import Publication
from pipeline.restarts import RestartBudget
from pipeline.run_folder import RunFolder
from pipeline.served_weights import ServedWeights
from pipeline.session_report import SessionReport
from pipeline.session_start import Start, coordinator_config
from pipeline.stages import Stage, StageBoard
from pipeline.trainer_return import go_back
from pipeline.trainer_turns import TrainerTurns
from pipeline.workers import Workers
from recovery.accounting import Identity
from vime.errors import PublicationError, TrainerDiedError
from vime.settings.groups import Settings
from vime.utils.kill_points import KillPoint, reach
from vime.utils.types import Sample


@dataclass(frozen=True)
class LoopParts:
    """Whom the loop leads. They are the session's, which closes them."""

    workers: Workers
    weights: ServedWeights
    trainer: TrainerTurns
    turns: MemoryTurns
    commits: Commits
    evaluations: Evaluations
    hooks: BatchHooks
    dumps: RolloutDumps
    report: SessionReport


class TrainLoop:
    """Knows how far training has come, and from which commit it goes on when the ranks are lost."""

    def __init__(
        self,
        settings: Settings,
        folder: RunFolder,
        start: Start,
        at_start: Identity,
        parts: LoopParts,
        view: ProgressView,
        stages: StageBoard,
        interrupts: Interrupts,
    ) -> None:
        """`at_start` is where the groups were when the session began; what it is at is told to `stages`."""
        self._settings, self._folder, self._at_start = settings, folder, at_start
        self._workers, self._weights, self._commits = parts.workers, parts.weights, parts.commits
        self._trainer, self._turns, self._evaluations = parts.trainer, parts.turns, parts.evaluations
        self._hooks, self._report = parts.hooks, parts.report
        self._view, self._stages, self._interrupts = view, stages, interrupts
        self._session = start.branch
        """Its name for the queue; branches change when the trainer goes back to a commit."""
        self._planning = BatchPlanning(
            settings,
            parts.workers,
            parts.hooks,
            parts.dumps,
            parts.report.clock,
            stages,
            report=view.waiting,
            check=self._stop_when_too_many_failed,
            stop_asked=lambda: interrupts.stop_asked,
        )
        self._trainer_restarts = RestartBudget(settings.queue.max_process_restarts)
        self._num_rollout = settings.data.num_rollout or 0
        self.start = start
        """What is trained on from; another one after the ranks were lost."""
        self.done_rollouts = start.plan.start_rollout
        """Rollout batches that are trained on the present branch."""

    @property
    def has_trained(self) -> bool:
        """Whether a batch was trained since `start`."""
        return self.done_rollouts > self.start.plan.start_rollout

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to train."""
        return self.done_rollouts >= self._num_rollout

    @property
    def last_is_uncommitted(self) -> bool:
        """Whether the newest rollout batch is in no commit on disk."""
        newest = self._commits.newest
        return newest is None or newest[1] != self.done_rollouts - 1

    async def run(self) -> None:
        """Train batch after batch, until all are trained or the user asks to stop.

        Raises:
            TooManyFailuresError: too many groups were set aside.
            PublicationError: no engine serves any longer; what was due to be committed is.
            TrainerDiedError: a rank died, and nothing is left to go back to.
        """
        while not self.is_done:
            try:
                if not await self._one_batch(self.done_rollouts):
                    return
            except TrainerDiedError as death:
                await self._go_back(death)
            except PublicationError:
                await self._workers.guarded(self._commits.settle())  # what is trained is kept
                raise

    async def commit_last(self) -> None:
        """Commit the newest rollout batch, unless it is, and wait until that is on disk."""
        await self._workers.guarded(self._commits.settle())
        if self.last_is_uncommitted:
            await self._workers.guarded(self._commits.commit(self.start, self.done_rollouts - 1, self._weights.version))
            await self._workers.guarded(self._commits.settle())

    async def _go_back(self, death: TrainerDiedError) -> None:
        """Start the ranks again from the newest commit; engines, producers and queue go on.

        Raises:
            TrainerDiedError: no restart is left, or what was trained since the commit is gone with a queue in memory.
        """
        while (which := None if self._settings.queue.is_in_memory else self._trainer_restarts.take()) is not None:
            try:
                await self._restart_trainers(which, death)
                return
            except TrainerDiedError as another:
                death = another
        raise death

    async def _restart_trainers(self, which: str, death: TrainerDiedError) -> None:
        self._stages.begin(Stage("the trainer's ranks start again"))
        await self._commits.abandon()
        await self._weights.abandon()
        await self._workers.trainers.abandon()
        done = self.done_rollouts
        self.start = go_back(self.start, self._folder, self._commits.newest, self._weights.version)
        self.done_rollouts = self.start.plan.start_rollout
        self._view.note(
            f"A trainer rank died: the ranks go back from rollout {done} to {self.done_rollouts}, {which}. "
            f"{death.message.splitlines()[0]}"
        )
        self._evaluations.branch = self.start.branch
        self._weights.trainer_changed()
        await self._workers.queue.begin_branch(coordinator_config(self._settings, self.start, self._session))
        await self._give_memory_to_trainer()
        await self._workers.guarded(self._trainer.start())
        await self._weights.publish_of_new_trainer()
        self._view.note(
            f"The trainer goes on after rollout {self.done_rollouts}; version {self._weights.version} serves."
        )

    async def _one_batch(self, rollout_id: int) -> bool:
        """Wait, plan, train, commit and publish; False when the user asked to stop."""
        await self._workers.guarded(self._turns.trainer_leaves())
        planning = self._planning.next(rollout_id, self.start.branch, self._trainer.packing, self._weights.plan_under)
        if self._workers.engines.keeper is not None:
            planning = engines_brought_back(planning, self._weights)
        plan = await self._workers.guarded(planning)
        if plan is None:
            return False
        await self._give_memory_to_trainer()
        await self._trainer.revive()
        self._weights.trainer_changed()
        self._stages.begin(Stage("trains", rollout_id + 1))
        samples, reports = await self._workers.guarded(self._read_and_train(plan))
        reach(KillPoint.AFTER_TRAIN)
        await self._workers.queue.training_completed(plan)
        await self._hooks.trained()
        self.done_rollouts = rollout_id + 1
        self._report.clock.trained()
        publication = await self._commit_and_publish(rollout_id)
        self._report.clock.published()
        counts, stats = await self._workers.guarded(self._workers.counts_and_stats())
        await self._report.batch(plan, reports, publication, counts, stats, samples)
        self._evaluations.collect()
        self._stop_when_too_many_failed(counts)
        return not self._interrupts.stop_asked

    async def _give_memory_to_trainer(self) -> None:
        """Where trainer and engines share devices, end requests; those of an evaluation are waited for."""
        if self._settings.cluster.engines_leave_memory:
            await self._workers.guarded(self._evaluations.responses_are_there())
        await self._workers.guarded(self._turns.give_to_trainer())

    async def _read_and_train(self, plan: BatchPlan) -> tuple[list[Sample], list[TrainReport]]:
        """Train a batch, and read the samples that its report needs; afterwards they may be gone."""
        async with self._commits.trainers_busy:
            return await asyncio.gather(self._report.samples(plan), self._workers.train(encode(plan)))

    async def _commit_and_publish(self, rollout_id: int) -> Publication | None:
        """What is due after this rollout batch; the publication that ended since the one before, where one did.

        The commit comes first, beside a publication that is under way: that may fail, or never end.
        """
        due = due_after(rollout_id + 1, self._settings, self._evaluations.schedule)
        if due.commit:
            self._stages.begin(Stage("commits", rollout_id + 1))
            await self._workers.guarded(self._commits.commit(self.start, rollout_id, self._weights.planning_version))
        settled = await self._settled(rollout_id)
        if not due.goes_on or self._interrupts.stop_asked:
            return settled
        publication = None
        if due.publication:
            publication = await self._publish(rollout_id, waits=due.evaluation)
        if not self._weights.is_publishing and (publication is None or not publication.raised):
            await self._weights.keep()
        await self._trainer.release()
        if due.evaluation:
            self._evaluations.begin(rollout_id + 1)
        return publication or settled

    async def _settled(self, rollout_id: int) -> Publication | None:
        """Wait for the publication that is under way beside the training."""
        if self._weights.is_publishing:
            self._stages.begin(Stage("publishes weights", rollout_id + 1))
        return await self._workers.guarded(self._weights.settle())

    async def _publish(self, rollout_id: int, *, waits: bool) -> Publication | None:
        """The publication, or None where it goes on beside the training, unless it `waits` for the end."""
        self._stages.begin(Stage("publishes weights", rollout_id + 1))
        reach(KillPoint.BEFORE_WEIGHTS)
        publish = self._weights.publish_and_tell if waits else self._weights.begin_to_publish
        publication = await self._workers.guarded(publish())
        reach(KillPoint.AFTER_WEIGHTS)
        return publication

    def _stop_when_too_many_failed(self, counts: QueueCounts) -> None:
        self._commits.check()
        self._weights.check()
        stop_when_too_many_failed(self._settings, self._folder.root, self._at_start, counts)
