"""One session of a run: start all, then wait - plan - train - commit - publish, until the last rollout."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from pipeline.batch_hooks import BatchHooks
from pipeline.batch_wait import groups_to_wait_for, wait_for_batch
from pipeline.cluster import Cluster
from pipeline.commits import Commits
from pipeline.debug.dumps import RolloutDumps
from pipeline.devices import visible_gpus
from pipeline.engine_in_turns import kept_in_turns
from pipeline.engine_return import engines_brought_back
from pipeline.evaluation.session import Evaluations
from pipeline.evaluation.start import evaluation_schedule
from pipeline.failed_fraction import stop_when_too_many_failed
from pipeline.incidents import IncidentLog
from pipeline.interrupt import Ending, Interrupts
from pipeline.memory_turns import MemoryTurns
from pipeline.messages import QueueCounts, TrainReport, encode
from pipeline.metric_sinks.sinks import MetricSinks
from pipeline.optional_records import OptionalRecords
from pipeline.parity_at_start import check_parity
from pipeline.plan_settings import plan_settings
from pipeline.planner import BatchPlan, batch_id_of, plan_batch
from pipeline.process_reports import ProcessReports
from pipeline.progress import ProgressView
from pipeline.publisher import Publication
from pipeline.restarts import RestartBudget
from pipeline.run_folder import RunFolder
from pipeline.served_weights import ServedWeights, publications_overlap, start_publisher
from pipeline.session_report import SessionReport
from pipeline.session_start import Start, coordinator_config
from pipeline.stages import Stage, StageBoard
from pipeline.storage_proof import prove_nodes
from pipeline.supervision import Patience, Supervisor
from pipeline.trainer_return import go_back
from pipeline.trainer_turns import TrainerTurns
from pipeline.wiring import build_conversion, open_pool
from pipeline.workers import Workers
from recovery.branch import Branch, append_branch
from storage.contracts import PayloadPool
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import TrainerDiedError
from vime.settings.groups import Settings
from vime.settings.parse import HookArgs
from vime.utils.kill_points import KillPoint, reach
from vime.utils.types import Sample


class Session:
    """From the start of the processes to their end."""

    def __init__(
        self,
        settings: Settings,
        folder: RunFolder,
        start: Start,
        cluster: Cluster,
        view: ProgressView,
        interrupts: Interrupts,
        sinks: MetricSinks,
        incidents: IncidentLog,
        *,
        evaluates_first: bool,
    ) -> None:
        """`evaluates_first`: the policy that it starts from is evaluated before it is trained."""
        self._settings, self._folder, self._start = settings, folder, start
        self._view, self._interrupts, self._incidents = view, interrupts, incidents
        self._workers = Workers(settings, folder, cluster, view.note)
        self._turns = MemoryTurns(settings.cluster, self._workers)
        self._frozen: list[EngineClient] = []
        """One for each engine that isn't trained."""
        records = OptionalRecords()
        self._dumps = RolloutDumps(settings.debug.rollout_data_template, self._open_pool, view.note, records)
        self._commits = Commits(settings, folder, start, self._workers, view.note)
        self._trainer = TrainerTurns(settings, self._workers, self._commits, view)
        self._report = SessionReport(settings, folder, view, sinks, self._hook_args, self._open_pool, records)
        self._hooks = BatchHooks(settings, self._hook_args, self._open_pool, build_conversion(settings))
        self._evaluates_first = evaluates_first
        self._evaluations = Evaluations(
            self._workers,
            folder,
            view,
            evaluation_schedule(settings),
            copy=sinks.evaluation,
            branch=start.branch,
            publication_wait_s=settings.evaluation.eval_publication_wait,
            stop_asked=self._stop_asked,
        )
        self._session = start.branch
        """Its name for the queue; branches change when the trainer goes back to a commit."""
        self._stages = StageBoard()
        self._trainer_restarts = RestartBudget(settings.queue.max_process_restarts)
        self._num_rollout = settings.data.num_rollout or 0
        self._done_rollouts = start.plan.start_rollout
        self._weights: ServedWeights | None = None
        self._is_done = False

    async def run(self) -> Ending:
        clients: list[EngineClient] = []
        try:
            weights = await self._start_all(clients)
            with self._interrupts.finishing_steps():
                await self._train_all(weights)
                await self._workers.guarded(weights.settle())
                self._stages.begin(Stage("the last evaluation goes on", is_bounded=False))
                if self._evaluations.are_going_on:
                    await self._workers.guarded(weights.serve_on())
                await self._workers.guarded(self._evaluations.finish())
                self._stages.begin(Stage("the session ends"))
                if self._last_is_uncommitted:
                    await self._workers.guarded(self._turns.give_to_trainer())
                failed = await self._workers.stop_producers()
                await self._commit_last(weights)
            if failed is not None:
                raise failed
            self._report.end(
                await self._workers.queue.identity(),
                self._done_rollouts,
                names_bottleneck=self._workers.has_engines and self._done_rollouts > self._start.plan.start_rollout,
            )
            self._is_done = self._done_rollouts >= self._num_rollout
            return Ending.DONE if self._is_done else Ending.INTERRUPTED
        finally:
            if self._weights is not None:
                await self._weights.abandon()
            for client in (*clients, *self._frozen):
                await client.close()
            await self._commits.abandon()
            await self._workers.stop(keeps_engines=not self._is_done)

    async def _start_all(self, clients: list[EngineClient]) -> ServedWeights:
        """Start every process and publish the first version; `clients` gets one for each engine."""
        workers = self._workers
        self._begin_to_start("the queue coordinator starts")
        await prove_nodes(self._folder.queue, self._settings.queue)
        await workers.queue.start(coordinator_config(self._settings, self._start, self._session))
        self._supervise(clients)
        self._at_start = await workers.queue.identity()
        self._view.note(f"At start: {self._at_start}")
        kept_version = await workers.guarded(workers.take_over_engines())
        await workers.start_routers()
        self._begin_to_start("engines and trainer start")
        addresses = await workers.guarded(self._turns.start_both(self._start_engines, self._start_trainer))
        workers.write_engine_targets()
        self._begin_to_start("producers start")
        await workers.start_producers(addresses)
        clients.extend(self._turns.engine(each, is_asleep=each in workers.taken_over) for each in addresses)
        self._frozen.extend(
            self._turns.engine(each, is_asleep=each in workers.taken_over, is_trained=False) for each in workers.frozen
        )
        publisher = await start_publisher(
            self._settings, self._folder, self._start, workers, clients, self._turns, kept_version, self._incidents
        )
        weights = ServedWeights(
            publisher,
            workers,
            self._commits,
            self._trainer,
            self._turns,
            self._view.note,
            self._evaluations,
            overlaps=publications_overlap(self._settings, visible_gpus()),
        )
        self._weights = weights
        append_branch(
            self._folder.root,
            Branch(self._start.branch, self._start.parent, self._start.plan.directory, weights.version),
        )
        await workers.record_processes()
        if why := self._why_nothing_is_compared(kept_version):
            self._view.note(f"--check-weight-update-equal compares nothing: {why}.")
        await workers.guarded(self._turns.give_to_trainer())
        self._begin_to_start("the first weights are published")
        first = await workers.guarded(weights.publish())
        if clients:
            self._view.note(f"Weights published as version {first.version} ({first.wire_bytes / 1e6:.1f} MB).")
            self._begin_to_start("engines are compared with the trainer")
            await workers.guarded(check_parity(self._settings, workers, self._turns, addresses, first, self._view.note))
        await self._trainer.release()
        self._report.clock.start()
        return weights

    def _begin_to_start(self, what: str) -> None:
        """The next of the things that a start does in turn; none is bounded, their own parts have their limits."""
        self._stages.begin(Stage(what, is_bounded=False))
        self._view.waiting(f"{what[0].upper()}{what[1:]}.")

    async def _start_engines(self) -> list[str]:
        started = time.monotonic()
        addresses = await self._workers.start_engines(self._view.waiting, partial(kept_in_turns, self._turns))
        if addresses:
            self._view.note(f"Engines ready after {time.monotonic() - started:.0f} s.")
        return addresses

    async def _start_trainer(self) -> None:
        started = time.monotonic()
        await self._trainer.start()
        self._view.note(f"Trainer ready after {time.monotonic() - started:.0f} s.")

    def _why_nothing_is_compared(self, kept_version: int | None) -> str:
        if not self._settings.weights.check_weight_update_equal:
            return ""
        if self._start.commit is not None:
            return "this run goes on from a commit"
        return "" if kept_version is None else "engines were kept from a session before"

    def _supervise(self, clients: list[EngineClient]) -> None:
        """From now on a run that doesn't go on says why, and ends at last."""
        queue = self._settings.queue
        supervisor = Supervisor(
            self._stages,
            ProcessReports(
                self._workers, clients, self._frozen, lambda: {} if self._weights is None else self._weights.fenced
            ),
            Patience(queue.stall_after, queue.stall_timeout),
            self._report.stall,
        )
        self._workers.watch.add("supervisor", supervisor.run())

    async def _train_all(self, weights: ServedWeights) -> None:
        if self._evaluates_first:
            self._evaluations.begin(self._done_rollouts)
        while self._done_rollouts < self._num_rollout:
            try:
                if not await self._one_batch(self._done_rollouts, weights):
                    return
            except TrainerDiedError as death:
                await self._go_back(weights, death)

    async def _go_back(self, weights: ServedWeights, death: TrainerDiedError) -> None:
        """Start the ranks again from the newest commit; engines, producers and queue go on.

        Raises:
            TrainerDiedError: no restart is left, or what was trained since the commit is gone with a queue in memory.
        """
        while (which := None if self._settings.queue.is_in_memory else self._trainer_restarts.take()) is not None:
            try:
                await self._restart_trainers(weights, which, death)
                return
            except TrainerDiedError as another:
                death = another
        raise death

    async def _restart_trainers(self, weights: ServedWeights, which: str, death: TrainerDiedError) -> None:
        self._stages.begin(Stage("the trainer's ranks start again"))
        await self._commits.abandon()
        await weights.abandon()
        await self._workers.trainers.abandon()
        done = self._done_rollouts
        self._start = go_back(self._start, self._folder, self._commits.newest, weights.version)
        self._done_rollouts = self._start.plan.start_rollout
        self._view.note(
            f"A trainer rank died: the ranks go back from rollout {done} to {self._done_rollouts}, {which}. "
            f"{death.message.splitlines()[0]}"
        )
        self._evaluations.branch = self._start.branch
        weights.trainer_changed()
        await self._workers.queue.begin_branch(coordinator_config(self._settings, self._start, self._session))
        await self._give_memory_to_trainer()
        await self._workers.guarded(self._trainer.start())
        await weights.publish_of_new_trainer()
        self._view.note(f"The trainer goes on after rollout {self._done_rollouts}; version {weights.version} serves.")

    async def _one_batch(self, rollout_id: int, weights: ServedWeights) -> bool:
        """Wait, plan, train, commit and publish; False when the user asked to stop."""
        await self._workers.guarded(self._turns.trainer_leaves())
        planning = self._next_plan(rollout_id, weights)
        if self._workers.keeper is not None:
            planning = engines_brought_back(planning, weights)
        plan = await self._workers.guarded(planning)
        if plan is None:
            return False
        await self._give_memory_to_trainer()
        await self._trainer.revive()
        weights.trainer_changed()
        self._stages.begin(Stage("trains", rollout_id + 1))
        samples, reports = await self._workers.guarded(self._read_and_train(plan))
        reach(KillPoint.AFTER_TRAIN)
        await self._workers.queue.training_completed(plan)
        await self._hooks.trained()
        self._done_rollouts = rollout_id + 1
        self._report.clock.trained()
        publication = await self._commit_and_publish(rollout_id, weights)
        self._report.clock.published()
        counts, stats = await self._workers.guarded(self._workers.counts_and_stats())
        await self._report.batch(plan, reports, publication, counts, stats, samples)
        self._evaluations.collect()
        self._stop_when_too_many_failed(counts)
        return not self._stop_asked()

    async def _next_plan(self, rollout_id: int, weights: ServedWeights) -> BatchPlan | None:
        """Wait for enough groups, plan, persist. None when the user asked to stop meanwhile."""
        self._report.clock.waits()
        wanted = groups_to_wait_for(self._settings.data.rollout_batch_size or 0, self._num_rollout - rollout_id)
        self._stages.begin(Stage("", rollout_id + 1, groups_wanted=wanted))
        groups = await wait_for_batch(
            self._workers.queue,
            self._workers.stats,
            wanted,
            stall_timeout_s=None,
            report=self._view.waiting,
            check=self._stop_when_too_many_failed,
            stop_asked=self._stop_asked,
        )
        if groups is None:
            return None
        self._report.clock.waited()
        self._stages.begin(Stage("is planned", rollout_id + 1))
        batch_id = batch_id_of(self._start.branch, rollout_id)
        chosen, processed = await self._hooks.batch(groups, rollout_id, batch_id)
        plan = plan_batch(
            chosen,
            plan_settings(self._settings, self._trainer.packing),
            branch=self._start.branch,
            rollout_id=rollout_id,
            policy_version=weights.plan_under(),
            processed=processed,
        )
        reach(KillPoint.BEFORE_PLAN)
        await self._workers.queue.record_plan(plan, encode(plan))
        reach(KillPoint.AFTER_PLAN)
        await self._dumps.save(plan)
        return plan

    async def _give_memory_to_trainer(self) -> None:
        """Where trainer and engines share devices, end requests; those of an evaluation are waited for."""
        if self._settings.cluster.engines_leave_memory:
            await self._workers.guarded(self._evaluations.responses_are_there())
        await self._workers.guarded(self._turns.give_to_trainer())

    async def _read_and_train(self, plan: BatchPlan) -> tuple[list[Sample], list[TrainReport]]:
        """Train a batch, and read the samples that its report needs; afterwards they may be gone."""
        async with self._commits.trainers_busy:
            return await asyncio.gather(self._report.samples(plan), self._workers.train(encode(plan)))

    async def _commit_and_publish(self, rollout_id: int, weights: ServedWeights) -> Publication | None:
        """What is due after this rollout batch; the publication that ended since the one before, where one did."""
        settled = await self._settled(rollout_id, weights)
        is_last = rollout_id == self._num_rollout - 1
        evaluates = self._evaluations.schedule.is_due(rollout_id + 1)
        interval = 1 if self._settings.cluster.release_train else self._settings.checkpoint.save_interval
        if (interval is not None and (rollout_id + 1) % interval == 0) or (evaluates and is_last):
            self._stages.begin(Stage("commits", rollout_id + 1))
            await self._workers.guarded(self._commits.commit(self._start, rollout_id, weights.version))
        if (is_last and not evaluates) or self._interrupts.stop_asked:
            return settled
        publication = None
        if evaluates or (rollout_id + 1) % self._settings.weights.update_weights_interval == 0:
            publication = await self._publish(rollout_id, weights, waits=evaluates)
        if not weights.is_publishing and (publication is None or not publication.raised):
            await weights.keep()
        await self._trainer.release()
        if evaluates:
            self._evaluations.begin(rollout_id + 1)
        return publication or settled

    async def _settled(self, rollout_id: int, weights: ServedWeights) -> Publication | None:
        """Wait for the publication that is under way beside the training."""
        if weights.is_publishing:
            self._stages.begin(Stage("publishes weights", rollout_id + 1))
        return await self._workers.guarded(weights.settle())

    async def _publish(self, rollout_id: int, weights: ServedWeights, *, waits: bool) -> Publication | None:
        """The publication, or None where it goes on beside the training, unless it `waits` for the end."""
        self._stages.begin(Stage("publishes weights", rollout_id + 1))
        reach(KillPoint.BEFORE_WEIGHTS)
        publish = weights.publish_and_tell if waits else weights.begin_to_publish
        publication = await self._workers.guarded(publish())
        reach(KillPoint.AFTER_WEIGHTS)
        return publication

    async def _commit_last(self, weights: ServedWeights) -> None:
        """Commit the newest rollout batch, unless it is, and wait until that is on disk."""
        await self._workers.guarded(self._commits.settle())
        if self._last_is_uncommitted:
            await self._workers.guarded(self._commits.commit(self._start, self._done_rollouts - 1, weights.version))
            await self._workers.guarded(self._commits.settle())

    @property
    def _last_is_uncommitted(self) -> bool:
        """Whether the newest rollout batch is in no commit on disk."""
        return self._commits.newest is None or self._commits.newest[1] != self._done_rollouts - 1

    def _stop_asked(self) -> bool:
        return self._interrupts.stop_asked

    def _stop_when_too_many_failed(self, counts: QueueCounts) -> None:
        self._commits.check()
        if self._weights is not None:
            self._weights.check()
        stop_when_too_many_failed(self._settings, self._folder.root, self._at_start, counts)

    def _hook_args(self) -> HookArgs:
        return HookArgs(self._workers.settings)

    def _open_pool(self) -> PayloadPool:
        return open_pool(self._settings, self._workers.queue.actor)
