"""The run: restore, start, then wait - plan - train - publish - commit, until the last rollout."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from pipeline.alarm_log import AlarmLog, disk_of
from pipeline.batch_hooks import BatchHooks
from pipeline.batch_report import BatchReport
from pipeline.batch_wait import groups_to_wait_for, wait_for_batch
from pipeline.cluster import Cluster
from pipeline.commits import Commits
from pipeline.debug.dumps import RolloutDumps, save_tokenizer
from pipeline.debug.rollout_only import RolloutOnlySession, generation_alone
from pipeline.debug.train_only import train_stored
from pipeline.engine_in_turns import kept_in_turns
from pipeline.engine_return import engines_brought_back
from pipeline.evaluation.prompts import open_eval_sets, set_aside_words
from pipeline.evaluation.session import Evaluations
from pipeline.evaluation.start import evaluates_first, evaluation_schedule, highest_evaluated_version
from pipeline.failed_fraction import check_failed_fraction, check_some_accepted
from pipeline.fixed_settings import fixed_settings
from pipeline.frozen_sources import check_sources
from pipeline.incidents import IncidentLog, session_incidents
from pipeline.interrupt import Ending, Interrupts
from pipeline.kept_engines import engine_lease
from pipeline.memory_turns import MemoryTurns
from pipeline.messages import QueueCounts, TrainReport, encode
from pipeline.metric_sinks.sinks import MetricSinks, open_sinks
from pipeline.packing import PackingSettings
from pipeline.packing_settings import packing_settings
from pipeline.parity_verdict import engine_parity, refuse_difference
from pipeline.plan_settings import plan_settings
from pipeline.planner import BatchPlan, batch_id_of, plan_batch
from pipeline.process_reports import ProcessReports
from pipeline.producer_wiring import reward_name
from pipeline.progress import ProgressView, bottleneck
from pipeline.prometheus.exporter import write_engine_targets
from pipeline.prompt_source import build_prompt_source, set_bad_prompts_aside, with_num_rollout
from pipeline.publisher import Publication, WeightPublisher
from pipeline.restarts import RestartBudget
from pipeline.resume_words import resume_words
from pipeline.run_folder import RunFolder
from pipeline.session_lock import session_lock
from pipeline.session_start import Start, coordinator_config, prepare_start
from pipeline.stages import Stage, StageBoard
from pipeline.step_metrics import StepClock, step_record
from pipeline.storage_proof import prove_here, prove_nodes
from pipeline.stream_shares import StreamShares
from pipeline.supervision import Patience, StallRecord, Supervisor, write_stall
from pipeline.trainer_return import go_back
from pipeline.transports.promise import transport_words
from pipeline.weight_wiring import weight_transport
from pipeline.wiring import NUM_PRODUCERS, build_conversion, open_pool
from pipeline.workers import Workers
from recovery.accounting import Identity
from recovery.branch import Branch, append_branch
from recovery.claim import claim_queue
from recovery.fixed import hold_to_fixed
from recovery.home import live_at
from recovery.restore import RestoreMode
from storage.files import append_durably, write_atomically
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import RestoreError, TrainerDiedError
from vime.rollout.dynamic_filter import without_rejections
from vime.settings.groups import Settings
from vime.settings.parse import HookArgs
from vime.settings.record import settings_record
from vime.settings.resolve import Resolved
from vime.settings.rules.quantities import demand_of
from vime.utils.kill_points import KillPoint, reach
from vime.utils.types import Sample


def run_training(resolved: Resolved, view: ProgressView) -> Ending:
    """Run `vime train` to its end. Errors come out as `VimeError`."""
    if resolved.settings.debug.trains_only:
        return train_stored(resolved.settings, view)
    source = build_prompt_source(resolved.settings)
    resolved = with_num_rollout(resolved, source)
    settings = resolved.settings
    if settings.debug.debug_rollout_only:
        settings = generation_alone(settings)
    folder = RunFolder.of(settings)
    fixed = fixed_settings(settings, source)
    folder.make()
    with session_lock(folder):
        start = prepare_start(settings, folder)
        hold_to_fixed(folder.root, fixed)
        live_at(folder.root, folder.root / folder.output)
        for words in resume_words(settings, folder, start):
            view.note(words)
        left_out = [words for each in open_eval_sets(settings) for words in set_aside_words(each)]
        for words in [*set_bad_prompts_aside(source, folder.bad_prompts), *left_out]:
            view.note(words)
        evaluates = evaluates_first(settings, folder.root, step=start.plan.start_rollout, parent=start.parent)
        if start.plan.mode is RestoreMode.COMPLETE and not evaluates:
            return Ending.DONE
        if start.plan.mode is RestoreMode.COMPLETE and settings.data.num_rollout:
            view.note(f"The evaluation after step {start.plan.start_rollout} is missing and is made now.")
        for words in transport_words(settings, None if start.state is None else start.state.memory):
            view.note(words)
        check_sources(settings)
        if not settings.queue.is_in_memory:
            prove_here(folder.queue, settings.queue)
            claim_queue(folder.root, folder.queue, has_commits=start.commit is not None)
        _remove_leftovers(folder)
        write_atomically(folder.settings, settings_record(resolved))
        write_atomically(folder.settings_of(start.branch), settings_record(resolved))
        if settings.debug.dump_details is not None:
            save_tokenizer(settings.checkpoint.hf_checkpoint or "", Path(settings.debug.dump_details) / "tokenizer")
        with (
            session_incidents(folder.incidents) as incidents,
            Interrupts(view) as interrupts,
            engine_lease(settings, folder, view.note),
            Cluster(demand_of(settings), NUM_PRODUCERS, carries_samples=settings.queue.is_in_memory) as cluster,
        ):
            if settings.debug.debug_rollout_only:
                return interrupts.run(_generate(settings, folder, start, cluster, view, interrupts))
            with open_sinks(settings, folder, start.plan.start_rollout, view.note) as sinks:
                session = _Session(
                    settings, folder, start, cluster, view, interrupts, sinks, incidents, evaluates_first=evaluates
                )
                return interrupts.run(session.run())


async def _generate(
    settings: Settings, folder: RunFolder, start: Start, cluster: Cluster, view: ProgressView, interrupts: Interrupts
) -> Ending:
    """--debug-rollout-only."""
    if start.commit is not None:
        raise RestoreError(
            f"--debug-rollout-only with --save {folder.root}, whose run has a commit: its weights would not be served.",
            next_step="Give another --save, and as --hf-checkpoint what --save-hf exported.",
        )
    session = RolloutOnlySession(
        settings,
        folder,
        coordinator_config(settings, start, start.branch),
        cluster,
        view,
        interrupts,
        lambda workers: rollout_dumps(settings, workers, view),
    )
    return await session.run(partial(stop_when_too_many_failed, settings, folder))


def rollout_dumps(settings: Settings, workers: Workers, view: ProgressView) -> RolloutDumps:
    """What writes the samples of each batch that is planned."""
    return RolloutDumps(
        settings.debug.rollout_data_template, lambda: open_pool(settings, workers.coordinator), view.note
    )


def stop_when_too_many_failed(settings: Settings, folder: RunFolder, at_start: Identity, counts: QueueCounts) -> None:
    """Raises `TooManyFailuresError`."""
    dropped, generated = this_session(counts, at_start)
    check_failed_fraction(
        without_rejections(dropped), generated, allowed=settings.rollout.rollout_max_failed_fraction, run=folder.root
    )
    accepted = counts.trained + counts.pending - at_start.trained - at_start.pending
    check_some_accepted(dropped, accepted, batch=settings.data.rollout_batch_size or 1, run=folder.root)


def this_session(counts: QueueCounts, at_start: Identity) -> tuple[dict[str, int], int]:
    """Groups that this session has set aside, by reason, and all that it has worked on.

    Those of earlier sessions don't count: their cause may be repaired, and the run must be able to go on.
    """
    dropped = Counter(counts.dropped)
    dropped.subtract(at_start.dropped)
    return dict(+dropped), counts.generated - at_start.generated + at_start.in_flight


def _remove_leftovers(folder: RunFolder) -> None:
    """Ray's temporary folder of a session that was killed."""
    if folder.processes.exists():
        previous = msgspec.json.decode(folder.processes.read_bytes(), type=dict[str, object])
        shutil.rmtree(str(previous.get("ray_folder", "")), ignore_errors=True)


class _Session:
    """One session of a run."""

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
        self._sinks = sinks
        self._settings, self._folder, self._start = settings, folder, start
        self._view, self._interrupts = view, interrupts
        self._workers = Workers(settings, folder, cluster, view.note)
        self._turns = MemoryTurns(settings.cluster, self._workers)
        self._dumps = rollout_dumps(settings, self._workers, view)
        salts = settings.weights.prefix_cache_salt == "version"
        self._clock = StepClock(StreamShares(salts_prefixes=salts, reward=reward_name(settings)))
        queue_root = folder.root if settings.queue.is_in_memory else folder.queue
        self._alarms, self._incidents = AlarmLog(view.note, partial(disk_of, queue_root)), incidents
        self._commits = Commits(settings, folder, start, self._workers, view.note)
        self._done_rollouts = start.plan.start_rollout
        self._packing = PackingSettings(num_ranks=1)
        self._kept_version: int | None = None
        """The highest one that an engine of the session before holds, where engines outlived it."""
        self._is_done = False
        self._holds_published = False
        """Whether the trainer holds the weights of the version that serves."""
        self._report = BatchReport(
            settings,
            lambda: HookArgs(self._workers.settings),
            lambda: open_pool(settings, self._workers.coordinator),
        )
        self._hooks = BatchHooks(
            settings,
            lambda: HookArgs(self._workers.settings),
            lambda: open_pool(settings, self._workers.coordinator),
            build_conversion(settings),
        )
        self._evaluates_first = evaluates_first
        self._session = start.branch
        """Its name for the queue; branches change when the trainer goes back to a commit."""
        self._stages = StageBoard()
        self._publisher: WeightPublisher | None = None
        self._trainer_restarts = RestartBudget(settings.queue.max_process_restarts)
        self._evaluations = Evaluations(
            self._workers,
            folder,
            view,
            evaluation_schedule(settings),
            copy=sinks.evaluation,
            branch=start.branch,
            publication_wait_s=settings.evaluation.eval_publication_wait,
        )

    async def run(self) -> Ending:
        clients: list[EngineClient] = []
        try:
            publisher = await self._start_all(clients)
            with self._interrupts.finishing_steps():
                await self._train_all(publisher)
                self._stages.begin(Stage("the last evaluation goes on", is_bounded=False))
                await self._workers.guarded(self._evaluations.finish(self._stop_asked))
                self._stages.begin(Stage("the session ends"))
                failed = await self._workers.stop_producers()
                await self._commit_last(publisher)
            if failed is not None:
                raise failed
            self._say_goodbye(await self._workers.identity())
            self._is_done = self._done_rollouts >= (self._settings.data.num_rollout or 0)
            return Ending.DONE if self._is_done else Ending.INTERRUPTED
        finally:
            for client in clients:
                await client.close()
            await self._commits.abandon()
            await self._workers.stop(keeps_engines=not self._is_done)

    def _stop_asked(self) -> bool:
        return self._interrupts.stop_asked

    async def _commit_last(self, publisher: WeightPublisher) -> None:
        """Commit the newest rollout batch, unless it is, and wait until that is on disk."""
        await self._workers.guarded(self._commits.settle())
        if self._commits.newest is None or self._commits.newest[1] != self._done_rollouts - 1:
            await self._workers.guarded(self._commits.commit(self._start, self._done_rollouts - 1, publisher.version))
            await self._workers.guarded(self._commits.settle())

    async def _start_all(self, clients: list[EngineClient]) -> WeightPublisher:
        workers = self._workers
        await prove_nodes(self._folder.queue, self._settings.queue)
        await workers.start_coordinator(coordinator_config(self._settings, self._start, self._session))
        self._supervise(clients)
        self._at_start = await workers.identity()
        self._view.note(f"At start: {self._at_start}")
        self._kept_version = await workers.guarded(workers.take_over_engines())
        await workers.start_routers()
        addresses = await workers.guarded(
            self._turns.start_both(
                lambda: workers.start_engines(self._view.waiting, partial(kept_in_turns, self._turns)),
                self._start_trainers,
            )
        )
        write_engine_targets(self._settings.logging, self._folder, addresses)
        await workers.start_producers(addresses)
        clients.extend(self._turns.engine(each, is_asleep=each in workers.taken_over) for each in addresses)
        replace = self._turns.replace_engine = None if workers.keeper is None else workers.keeper.replace
        weights = self._settings.weights
        publisher = WeightPublisher(
            clients,
            weight_transport(self._settings, workers.trainers),
            workers,
            start_version=await self._start_version(),
            flush_interval=weights.flush_cache_interval,
            timeout_s=weights.update_weight_timeout,
            compare_first=weights.check_weight_update_equal
            and self._start.commit is None
            and self._kept_version is None,
            replace=replace,
            tell_fenced=self._note_fenced,
            lend_to_engines=self._turns.lent_to_engines,
        )
        self._publisher = publisher
        if self._kept_version is not None:
            publisher.sender_is_new()
        workers.keep_engines(publisher)
        append_branch(
            self._folder.root,
            Branch(self._start.branch, self._start.parent, self._start.plan.directory, publisher.version),
        )
        await workers.record_processes()
        if weights.check_weight_update_equal and self._start.commit is not None:
            self._view.note("--check-weight-update-equal compares nothing: this run goes on from a commit.")
        elif weights.check_weight_update_equal and self._kept_version is not None:
            self._view.note("--check-weight-update-equal compares nothing: engines were kept from a session before.")
        await workers.guarded(self._turns.give_to_trainer())
        first = await workers.guarded(publisher.publish())
        self._holds_published = first.raised
        if clients:
            self._view.note(f"Weights published as version {first.version} ({first.wire_bytes / 1e6:.1f} MB).")
            await workers.guarded(self._check_parity(addresses, first))
        await self._release_trainers()
        self._clock.start()
        return publisher

    def _supervise(self, clients: list[EngineClient]) -> None:
        """From now on a run that doesn't go on says why, and ends at last."""
        queue = self._settings.queue
        supervisor = Supervisor(
            self._stages,
            ProcessReports(self._workers, clients, lambda: {} if self._publisher is None else self._publisher.fenced),
            Patience(queue.stall_after, queue.stall_timeout),
            self._tell_of_stall,
        )
        self._workers.watch.add("supervisor", supervisor.run())

    def _tell_of_stall(self, record: StallRecord) -> None:
        self._view.note(f"No progress for {record.quiet_s:.0f} s: {record.words}.")
        write_stall(self._folder.stalls, record)

    async def _check_parity(self, addresses: Sequence[str], published: Publication) -> None:
        """Compare each engine but the fenced with the trainer on a few sequences. Raises `ParityError`."""
        engine, rollout = self._settings.engine, self._settings.rollout
        if not engine.parity_probes:
            return
        found = []
        serving = {number: address for number, address in enumerate(addresses) if address not in published.fenced}
        probed = await self._workers.probe_engines(list(serving.values()))
        async with self._turns.lent_to_trainer(published.version, serving.values()):
            for number, sequences in zip(serving, probed, strict=True):
                compared = await engine_parity(
                    f"Engine {number}",
                    sequences,
                    self._workers.score_probe,
                    temperature=rollout.rollout_temperature,
                    threshold=engine.parity_threshold,
                )
                self._view.note(str(compared))
                found.append(compared)
        refuse_difference(found, engine.parity_threshold)

    async def _start_trainers(self) -> None:
        """Start the ranks with what the newest commit holds, that of this session or of the one it continues."""
        self._packing = packing_settings(self._settings, await self._workers.start_trainers())
        if self._commits.newest is None:
            await self._workers.on_trainers(lambda trainer: trainer.load_start.remote())
        else:
            directory, rollout_id = str(self._commits.newest[0]), self._commits.newest[1]
            await self._workers.on_trainers(lambda trainer: trainer.load.remote(directory, rollout_id))
        self._workers.trainers.watch()

    async def _release_trainers(self) -> None:
        """With --release-train end the ranks' processes until there is a batch to train."""
        if self._settings.cluster.release_train:
            await self._workers.guarded(self._commits.settle())
            await self._workers.guarded(self._workers.trainers.release())
            await self._workers.record_processes()

    async def _revive_trainers(self) -> None:
        """Start the ranks again where they were released."""
        if not self._workers.trainers.ranks:
            self._view.waiting("the trainer starts from what it was when it ended")
            await self._workers.guarded(self._start_trainers())
            await self._workers.record_processes()

    async def _start_version(self) -> int:
        """Versions never go back: also those that an abandoned session published, evaluated or wrote to disk count."""
        committed = 0 if self._start.commit is None else self._start.commit.weight_version
        return max(
            committed,
            self._kept_version or 0,
            highest_evaluated_version(self._folder.root),
            await self._workers.highest_version(),
            await self._workers.trainers.highest_version_on_disk(),
        )

    async def _train_all(self, publisher: WeightPublisher) -> None:
        last = (self._settings.data.num_rollout or 0) - 1
        if self._evaluates_first:
            self._evaluations.begin(self._done_rollouts)
        while self._done_rollouts <= last:
            try:
                if not await self._one_batch(self._done_rollouts, publisher):
                    return
            except TrainerDiedError as death:
                await self._go_back(publisher, death)

    async def _go_back(self, publisher: WeightPublisher, death: TrainerDiedError) -> None:
        """Start the ranks again from the newest commit; engines, producers and queue go on.

        Raises:
            TrainerDiedError: no restart is left, or what was trained since the commit is gone with a queue in memory.
        """
        while (which := None if self._settings.queue.is_in_memory else self._trainer_restarts.take()) is not None:
            try:
                await self._restart_trainers(publisher, which, death)
                return
            except TrainerDiedError as another:
                death = another
        raise death

    async def _restart_trainers(self, publisher: WeightPublisher, which: str, death: TrainerDiedError) -> None:
        self._stages.begin(Stage("the trainer's ranks start again"))
        await self._commits.abandon()
        await self._workers.trainers.abandon()
        done = self._done_rollouts
        self._start = go_back(self._start, self._folder, self._commits.newest, publisher.version)
        self._done_rollouts = self._start.plan.start_rollout
        self._view.note(
            f"A trainer rank died: the ranks go back from rollout {done} to {self._done_rollouts}, {which}. "
            f"{death.message.splitlines()[0]}"
        )
        self._evaluations.branch, self._holds_published = self._start.branch, False
        await self._workers.begin_branch(coordinator_config(self._settings, self._start, self._session))
        await self._workers.guarded(self._turns.give_to_trainer())
        await self._workers.guarded(self._start_trainers())
        publisher.sender_is_new()
        publication = await self._workers.guarded(publisher.publish())
        self._holds_published = publication.raised
        await self._workers.keep_version(publisher.version)
        await self._workers.record_processes()
        await self._release_trainers()
        self._tell_of_engines(publication)
        self._view.note(f"The trainer goes on after rollout {self._done_rollouts}; version {publisher.version} serves.")

    async def _one_batch(self, rollout_id: int, publisher: WeightPublisher) -> bool:
        """Wait, plan, train, commit and publish; False when the user asked to stop."""
        last = (self._settings.data.num_rollout or 0) - 1
        interval = 1 if self._settings.cluster.release_train else self._settings.checkpoint.save_interval
        await self._workers.guarded(self._turns.trainer_leaves())
        planning = self._next_plan(rollout_id, publisher)
        if self._workers.keeper is not None:
            planning = engines_brought_back(planning, publisher, self._bring_back)
        plan = await self._workers.guarded(planning)
        if plan is None:
            return False
        await self._give_memory_to_trainer()
        await self._revive_trainers()
        self._holds_published = False
        self._stages.begin(Stage("trains", rollout_id + 1))
        samples, reports = await self._workers.guarded(self._read_and_train(plan))
        reach(KillPoint.AFTER_TRAIN)
        await self._workers.training_completed(plan)
        await self._hooks.trained()
        self._done_rollouts = rollout_id + 1
        self._clock.trained()
        publication: Publication | None = None
        evaluates = self._evaluations.schedule.is_due(rollout_id + 1)
        if (interval is not None and (rollout_id + 1) % interval == 0) or (evaluates and rollout_id == last):
            self._stages.begin(Stage("commits", rollout_id + 1))
            await self._workers.guarded(self._commits.commit(self._start, rollout_id, publisher.version))
        if (rollout_id < last or evaluates) and not self._interrupts.stop_asked:
            publication = await self._publish(publisher, rollout_id, is_due=evaluates)
            await self._release_trainers()
            if evaluates:
                self._evaluations.begin(rollout_id + 1)
        self._clock.published()
        counts, stats = await self._workers.guarded(self._workers.counts_and_stats())
        numbers = self._report.numbers(samples)
        record = self._alarms.with_alarms(
            step_record(plan, last + 1, reports, publication, counts, stats, self._clock, numbers)
        )
        append_durably(self._folder.metrics, msgspec.json.encode(record))
        is_told, warning = await self._report.tell(record, samples)
        if warning:
            self._view.note(f"warning: {warning}")
        self._sinks.batch(record, is_told=is_told)
        if not is_told:
            self._view.step(record)
        self._alarms.tell()
        self._evaluations.collect()
        self._stop_when_too_many_failed(counts)
        return not self._stop_asked()

    async def _give_memory_to_trainer(self) -> None:
        """Where trainer and engines share devices, end requests; those of an evaluation are waited for."""
        if self._settings.cluster.engines_leave_memory:
            await self._workers.guarded(self._evaluations.responses_are_there(self._stop_asked))
        await self._workers.guarded(self._turns.give_to_trainer())

    async def _read_and_train(self, plan: BatchPlan) -> tuple[list[Sample], list[TrainReport]]:
        """Train a batch, and read the samples that its report needs; afterwards they may be gone."""
        async with self._commits.trainers_busy:
            return await asyncio.gather(self._report.samples(plan), self._workers.train(encode(plan)))

    async def _publish(self, publisher: WeightPublisher, rollout_id: int, *, is_due: bool) -> Publication | None:
        """Publish if it is due after this rollout batch, by `is_due` or by the interval of publications."""
        publication = None
        if is_due or (rollout_id + 1) % self._settings.weights.update_weights_interval == 0:
            await self._workers.guarded(self._evaluations.responses_are_there(self._stop_asked))
            self._stages.begin(Stage("publishes weights", rollout_id + 1))
            reach(KillPoint.BEFORE_WEIGHTS)
            async with self._commits.trainers_busy:
                publication = await self._workers.guarded(publisher.publish())
            reach(KillPoint.AFTER_WEIGHTS)
            self._holds_published = publication.raised
            self._tell_of_engines(publication)
        if publication is None or not publication.raised:
            await self._workers.keep_version(publisher.version)
        return publication

    async def _bring_back(self, publisher: WeightPublisher) -> None:
        """Give engines that were replaced the version that serves; a new one to all where that can't be repeated.

        Where trainer and engines take turns, those that serve are not stopped for it: the next turn's publication
        brings the others back.
        """
        if self._turns.engines_sleep:
            if publisher.serves:
                return
            await self._turns.give_to_trainer()
        publication = None
        if self._holds_published and publisher.repeats():
            async with self._commits.trainers_busy:
                publication = await publisher.catch_up()
        if publication is None or publisher.behind:
            await self._revive_trainers()
            async with self._commits.trainers_busy:
                publication = await publisher.publish()
            self._holds_published = publication.raised
            await self._workers.keep_version(publisher.version)
            await self._release_trainers()
        await self._turns.trainer_leaves()
        self._tell_of_engines(publication)

    def _tell_of_engines(self, publication: Publication) -> None:
        for address in publication.returned:
            self._view.note(f"Engine {address} serves again, with version {publication.version}.")
        for address, reason in publication.fenced.items():
            self._view.note(f"Engine {address} gets no requests until it confirms a version: {reason}")

    def _note_fenced(self, fenced: Mapping[str, str]) -> None:
        self._incidents.engines(fenced, {engine.address: engine.name for engine in self._workers.engines})

    async def _next_plan(self, rollout_id: int, publisher: WeightPublisher) -> BatchPlan | None:
        """Wait for enough groups, plan, persist. None when the user asked to stop meanwhile."""
        data = self._settings.data
        batch = data.rollout_batch_size or 0
        self._clock.waits()
        wanted = groups_to_wait_for(batch, (data.num_rollout or 0) - rollout_id)
        self._stages.begin(Stage("", rollout_id + 1, groups_wanted=wanted))
        groups = await wait_for_batch(
            self._workers,
            wanted,
            stall_timeout_s=None,
            report=self._view.waiting,
            check=self._stop_when_too_many_failed,
            stop_asked=self._stop_asked,
        )
        if groups is None:
            return None
        self._clock.waited()
        self._stages.begin(Stage("is planned", rollout_id + 1))
        batch_id = batch_id_of(self._start.branch, rollout_id)
        chosen, processed = await self._hooks.batch(groups, rollout_id, batch_id)
        plan = plan_batch(
            chosen,
            plan_settings(self._settings, self._packing),
            branch=self._start.branch,
            rollout_id=rollout_id,
            policy_version=publisher.version,
            processed=processed,
        )
        reach(KillPoint.BEFORE_PLAN)
        await self._workers.record_plan(plan, encode(plan))
        reach(KillPoint.AFTER_PLAN)
        await self._dumps.save(plan)
        return plan

    def _stop_when_too_many_failed(self, counts: QueueCounts) -> None:
        self._commits.check()
        stop_when_too_many_failed(self._settings, self._folder, self._at_start, counts)

    def _say_goodbye(self, identity: Identity) -> None:
        self._view.note(f"At end: {identity}")
        if self._workers.has_engines and self._done_rollouts > self._start.plan.start_rollout:
            shares = self._clock.shares
            idle = self._clock.trainer_idle_share, self._clock.generator_idle_share
            self._view.note(bottleneck(*idle, shares.reward_time, shares.reward))
        self._alarms.tell_at_end()
        wanted = self._settings.data.num_rollout or 0
        if self._done_rollouts < wanted:
            self._view.note(
                f"Stopped after {self._done_rollouts} of {wanted} rollouts. To resume, run the same command again "
                f"(with --load {self._folder.root})."
            )
