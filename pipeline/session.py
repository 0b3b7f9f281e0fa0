"""One session of a run: all processes start, the loop trains, and what goes on comes to its end."""

from __future__ import annotations

import time
from functools import partial

from pipeline.batch_hooks import BatchHooks
from pipeline.cluster import Cluster
from pipeline.commits import Commits
from pipeline.debug.dumps import RolloutDumps
from pipeline.devices import visible_gpus
from pipeline.engine_clients import EngineClients
from pipeline.engine_in_turns import kept_in_turns
from pipeline.evaluation.session import Evaluations
from pipeline.evaluation.start import evaluation_schedule
from pipeline.group_wiring import build_conversion
from pipeline.incidents import IncidentLog
from pipeline.interrupt import Ending, Interrupts
from pipeline.job_supervision import supervise
from pipeline.memory_turns import MemoryTurns
from pipeline.metric_sinks.sinks import MetricSinks
from pipeline.optional_records import OptionalRecords
from pipeline.parity_at_start import check_parity
from pipeline.pool_wiring import open_pool
from pipeline.process_reports import ProcessReports
from pipeline.progress import ProgressView
from pipeline.run_folder import RunFolder
from pipeline.served_weights import ServedWeights, publications_overlap, start_publisher
from pipeline.session_report import SessionReport
from pipeline.session_start import Start, coordinator_config
from pipeline.stages import Stage, StageBoard
from pipeline.storage_proof import prove_nodes
from pipeline.train_loop import LoopParts, TrainLoop
from pipeline.trainer_turns import TrainerTurns
from pipeline.workers import Workers
from recovery.accounting import Identity
from recovery.branch import Branch, append_branch
from storage.contracts import PayloadPool
from vime.errors import PublicationError, VimeError
from vime.settings.groups import Settings
from vime.settings.parse import HookArgs


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
        self._clients = EngineClients()
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
            stop_asked=lambda: interrupts.stop_asked,
        )
        self._stages = StageBoard()
        self._weights: ServedWeights | None = None
        self._is_done = False

    async def run(self) -> Ending:
        try:
            weights, at_start = await self._start_all()
            loop = self._loop(weights, at_start)
            with self._interrupts.finishing_steps():
                if self._evaluates_first:
                    self._evaluations.begin(loop.done_rollouts)
                await loop.run()
                failed = await self._come_to_rest(loop, weights)
            if failed is not None:
                raise failed
            self._report.end(
                await self._workers.queue.identity(),
                loop.done_rollouts,
                names_bottleneck=self._workers.engines.exist and loop.has_trained,
            )
            self._is_done = loop.is_done
            return Ending.DONE if self._is_done else Ending.INTERRUPTED
        finally:
            if self._weights is not None:
                await self._weights.abandon()
            await self._clients.close()
            await self._commits.abandon()
            await self._workers.stop(keeps_engines=not self._is_done)

    async def _come_to_rest(self, loop: TrainLoop, weights: ServedWeights) -> VimeError | None:
        """What goes on comes to its end, and the last batch into a commit; what a producer has failed with, if any."""
        try:
            await self._workers.guarded(weights.settle())
        except PublicationError:
            await loop.commit_last()  # what is trained is kept
            raise
        self._stages.begin(Stage("the last evaluation goes on", is_bounded=False))
        if self._evaluations.are_going_on:
            await self._workers.guarded(weights.serve_on())
        await self._workers.guarded(self._evaluations.finish())
        self._stages.begin(Stage("the session ends"))
        if loop.last_is_uncommitted:
            await self._workers.guarded(self._turns.give_to_trainer())
        failed = await self._workers.stop_producers()
        await loop.commit_last()
        return failed

    async def _start_all(self) -> tuple[ServedWeights, Identity]:
        """Start every process and publish the first version; where the groups were before."""
        workers = self._workers
        self._begin_to_start("the queue coordinator starts")
        await prove_nodes(self._folder.queue, self._settings.queue)
        await workers.queue.start(coordinator_config(self._settings, self._start, self._start.branch))
        self._supervise()
        at_start = await workers.queue.identity()
        self._view.note(f"At start: {at_start}")
        kept_version = await workers.guarded(workers.engines.take_over())
        await workers.start_routers()
        self._begin_to_start("engines and trainer start")
        addresses = await workers.guarded(self._turns.start_both(self._start_engines, self._start_trainer))
        workers.engines.write_targets()
        self._begin_to_start("producers start")
        await workers.start_producers()
        self._clients.open(workers.engines, self._turns)
        publisher = await start_publisher(
            self._settings,
            self._folder,
            self._start,
            workers,
            self._clients.trained,
            self._turns,
            kept_version,
            self._incidents,
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
        if self._clients.trained:
            self._begin_to_start("the first weights are published")
        first = await workers.guarded(weights.publish())
        if self._clients.trained:
            self._view.note(f"Weights published as version {first.version} ({first.wire_bytes / 1e6:.1f} MB).")
            self._begin_to_start("engines are compared with the trainer")
            await workers.guarded(check_parity(self._settings, workers, self._turns, addresses, first, self._view.note))
        await self._trainer.release()
        self._report.clock.start()
        return weights, at_start

    def _loop(self, weights: ServedWeights, at_start: Identity) -> TrainLoop:
        parts = LoopParts(
            self._workers,
            weights,
            self._trainer,
            self._turns,
            self._commits,
            self._evaluations,
            self._hooks,
            self._dumps,
            self._report,
        )
        return TrainLoop(
            self._settings, self._folder, self._start, at_start, parts, self._view, self._stages, self._interrupts
        )

    def _begin_to_start(self, what: str) -> None:
        """The next of the things that a start does in turn; none is bounded, their own parts have their limits."""
        self._stages.begin(Stage(what, is_bounded=False))
        self._view.stage(f"{what[0].upper()}{what[1:]}.")

    async def _start_engines(self) -> list[str]:
        started = time.monotonic()
        addresses = await self._workers.engines.start(self._view.waiting, partial(kept_in_turns, self._turns))
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

    def _supervise(self) -> None:
        """From now on a run that doesn't go on says why, and ends at last."""
        clients, workers = self._clients, self._workers
        reports = ProcessReports(
            workers, clients.trained, clients.frozen, lambda: {} if self._weights is None else self._weights.fenced
        )
        supervise(workers.watch, self._stages, reports, self._settings.queue, self._report.stall)

    def _hook_args(self) -> HookArgs:
        return HookArgs(self._workers.settings)

    def _open_pool(self) -> PayloadPool:
        return open_pool(self._settings, self._workers.queue.actor)
