"""The run: restore, start, then wait - plan - train - publish - commit, until the last rollout."""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from pipeline.batch_hooks import BatchHooks
from pipeline.batch_report import BatchReport
from pipeline.batch_wait import groups_to_wait_for, wait_for_batch
from pipeline.cluster import Cluster
from pipeline.coordinator import CoordinatorConfig
from pipeline.debug.dumps import RolloutDumps, save_tokenizer
from pipeline.debug.rollout_only import RolloutOnlySession, generation_alone
from pipeline.debug.train_only import train_stored
from pipeline.engine_return import engines_brought_back
from pipeline.evaluation.prompts import open_eval_sets, set_aside_words
from pipeline.evaluation.session import Evaluations
from pipeline.evaluation.start import evaluates_first, evaluation_schedule, highest_evaluated_version
from pipeline.failed_fraction import check_failed_fraction, check_some_accepted
from pipeline.fixed_settings import fixed_settings
from pipeline.frozen_sources import check_sources
from pipeline.interrupt import Ending, Interrupts
from pipeline.memory_turns import MemoryTurns
from pipeline.messages import QueueCounts, TrainReport, encode
from pipeline.packing import PackingSettings
from pipeline.packing_settings import packing_settings
from pipeline.parity_verdict import engine_parity, refuse_difference
from pipeline.plan_settings import plan_settings
from pipeline.planner import BatchPlan, batch_id_of, plan_batch
from pipeline.progress import ProgressView, bottleneck
from pipeline.prompt_source import build_prompt_source, set_bad_prompts_aside, with_num_rollout
from pipeline.publisher import Publication, WeightPublisher
from pipeline.run_folder import RunFolder
from pipeline.session_lock import session_lock
from pipeline.session_plan import plan_session
from pipeline.step_metrics import StepClock, step_record
from pipeline.storage_proof import prove_here, prove_nodes
from pipeline.transports.promise import transport_words
from pipeline.weight_wiring import weight_transport
from pipeline.wiring import NUM_PRODUCERS, build_conversion, open_pool
from pipeline.workers import Workers
from recovery.accounting import Identity
from recovery.branch import Branch, append_branch
from recovery.claim import claim_queue
from recovery.commit import (
    CommitParent,
    CommitRecord,
    QueueState,
    commit_path,
    iteration_directory,
    read_commit,
    read_queue_state,
    write_commit,
)
from recovery.fixed import hold_to_fixed
from recovery.restore import RestoreMode, RestorePlan, parent_of
from recovery.retention import releasable
from storage.disk_reserve import GIB
from storage.files import append_durably, make_folder, write_atomically
from storage.positions import PositionRanges
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import RestoreError
from vime.rollout.dynamic_filter import without_rejections
from vime.settings.groups import Settings
from vime.settings.parse import HookArgs
from vime.settings.record import settings_record
from vime.settings.resolve import Resolved
from vime.settings.rules.quantities import demand_of
from vime.utils.kill_points import KillPoint, reach
from vime.utils.types import Sample

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Start:
    """What a session starts from."""

    plan: RestorePlan
    branch: str
    parent: CommitParent | None
    commit: CommitRecord | None
    state: QueueState | None


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
        start = _prepare(settings, folder)
        hold_to_fixed(folder.root, fixed)
        for words in start.plan.words:
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
            Interrupts(view) as interrupts,
            Cluster(demand_of(settings), NUM_PRODUCERS, carries_samples=settings.queue.is_in_memory) as cluster,
        ):
            if settings.debug.debug_rollout_only:
                return interrupts.run(_generate(settings, folder, start, cluster, view, interrupts))
            session = _Session(settings, folder, start, cluster, view, interrupts, evaluates_first=evaluates)
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
        coordinator_config(settings, start),
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


def coordinator_config(settings: Settings, start: Start) -> CoordinatorConfig:
    """What the coordinator of a session is told. Batches trained before may have had another size."""
    data, queue = settings.data, settings.queue
    batch = data.rollout_batch_size or 0
    trained = [] if start.state is None else start.state.trained
    left = max(0, (data.num_rollout or 0) - start.plan.start_rollout)
    return CoordinatorConfig(
        branch=start.branch,
        trained=trained,
        groups_wanted=len(PositionRanges(trained)) + left * batch,
        max_groups=queue.rollout_queue_max_groups or max(2 * batch, data.over_sampling_batch_size or 0),
        surplus=max(0, (data.over_sampling_batch_size or batch) - batch),
        lease_seconds=queue.rollout_queue_lease_seconds,
        next_group_index=0 if start.state is None else start.state.next_group_index,
        memory=None if start.state is None else start.state.memory,
        batch=max(1, batch),
        max_staleness=queue.max_staleness,
        online_gc=queue.rollout_queue_online_gc,
        reserve_bytes=round(queue.rollout_disk_reserve_gib * GIB),
    )


def _prepare(settings: Settings, folder: RunFolder) -> Start:
    branch = uuid.uuid4().hex[:12]
    plan = plan_session(settings, new_branch=branch)
    if plan.commit_directory is None or plan.commit_rollout is None:
        return Start(plan, branch, None, None, None)
    directory = folder.root / plan.commit_directory
    record = read_commit(commit_path(directory, plan.commit_rollout))
    state = read_queue_state(directory, plan.commit_rollout)
    return Start(plan, branch, parent_of(plan, record.branch), record, state)


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
        *,
        evaluates_first: bool,
    ) -> None:
        self._settings, self._folder, self._start = settings, folder, start
        self._view, self._interrupts = view, interrupts
        self._directory = folder.root / start.plan.directory
        self._workers = Workers(settings, folder, cluster, view.note)
        self._turns = MemoryTurns(settings.cluster, self._workers)
        self._dumps = rollout_dumps(settings, self._workers, view)
        self._clock = StepClock()
        plan = start.plan
        self._committed: tuple[Path, int] | None = None
        """Folder and rollout of the newest commit."""
        if plan.commit_directory is not None and plan.commit_rollout is not None:
            self._committed = (folder.root / plan.commit_directory, plan.commit_rollout)
        self._done_rollouts = start.plan.start_rollout
        self._packing = PackingSettings(num_ranks=1)
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
        self._evaluations = Evaluations(
            self._workers,
            folder,
            view,
            evaluation_schedule(settings),
            branch=start.branch,
            publication_wait_s=settings.evaluation.eval_publication_wait,
        )

    async def run(self) -> Ending:
        clients: list[EngineClient] = []
        try:
            publisher = await self._start_all(clients)
            with self._interrupts.finishing_steps():
                await self._train_all(publisher)
                await self._workers.guarded(self._evaluations.finish(self._stop_asked))
                failed = await self._workers.stop_producers()
                await self._commit_last(publisher)
            if failed is not None:
                raise failed
            self._say_goodbye(await self._workers.identity())
            done = self._done_rollouts >= (self._settings.data.num_rollout or 0)
            return Ending.DONE if done else Ending.INTERRUPTED
        finally:
            for client in clients:
                await client.close()
            await self._workers.stop()

    def _stop_asked(self) -> bool:
        return self._interrupts.stop_asked

    async def _commit_last(self, publisher: WeightPublisher) -> None:
        """Commit the newest rollout batch, unless it is."""
        if self._committed is None or self._committed[1] != self._done_rollouts - 1:
            await self._workers.guarded(self._commit(self._done_rollouts - 1, publisher.version))

    async def _start_all(self, clients: list[EngineClient]) -> WeightPublisher:
        workers = self._workers
        await prove_nodes(self._folder.queue, self._settings.queue)
        await workers.start_coordinator(coordinator_config(self._settings, self._start))
        self._at_start = await workers.identity()
        self._view.note(f"At start: {self._at_start}")
        await workers.start_routers()
        addresses = await self._turns.start_both(
            lambda: workers.start_engines(self._view.waiting), self._start_trainers
        )
        await workers.start_producers(addresses)
        clients.extend(self._turns.engine(address) for address in addresses)
        weights = self._settings.weights
        publisher = WeightPublisher(
            clients,
            weight_transport(self._settings, workers),
            workers,
            start_version=await self._start_version(),
            flush_interval=weights.flush_cache_interval,
            timeout_s=weights.update_weight_timeout,
            compare_first=weights.check_weight_update_equal and self._start.commit is None,
            replace=None if workers.keeper is None else workers.keeper.replace,
        )
        workers.keep_engines(publisher)
        append_branch(
            self._folder.root,
            Branch(self._start.branch, self._start.parent, self._start.plan.directory, publisher.version),
        )
        await workers.record_processes()
        if weights.check_weight_update_equal and self._start.commit is not None:
            self._view.note("--check-weight-update-equal compares nothing: this run goes on from a commit.")
        await workers.guarded(self._turns.give_to_trainer())
        first = await workers.guarded(publisher.publish())
        self._holds_published = first.raised
        if clients:
            self._view.note(f"Weights published as version {first.version} ({first.wire_bytes / 1e6:.1f} MB).")
            await workers.guarded(self._check_parity(addresses, first))
        await self._release_trainers()
        self._clock.start()
        return publisher

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
        if self._committed is None:
            await self._workers.on_trainers(lambda trainer: trainer.load_start.remote())
        else:
            directory, rollout_id = str(self._committed[0]), self._committed[1]
            await self._workers.on_trainers(lambda trainer: trainer.load.remote(directory, rollout_id))
        self._workers.watch_trainers()

    async def _release_trainers(self) -> None:
        """With --release-train end the ranks' processes until there is a batch to train."""
        if self._settings.cluster.release_train:
            await self._workers.guarded(self._workers.release_trainers())
            await self._workers.record_processes()

    async def _revive_trainers(self) -> None:
        """Start the ranks again where they were released."""
        if not self._workers.trainers:
            self._view.waiting("the trainer starts from what it was when it ended")
            await self._workers.guarded(self._start_trainers())
            await self._workers.record_processes()

    async def _start_version(self) -> int:
        """Versions never go back: also those that an abandoned session published, evaluated or wrote to disk count."""
        committed = 0 if self._start.commit is None else self._start.commit.weight_version
        return max(
            committed,
            highest_evaluated_version(self._folder.root),
            await self._workers.highest_version(),
            await self._workers.highest_version_on_disk(),
        )

    async def _train_all(self, publisher: WeightPublisher) -> None:
        last = (self._settings.data.num_rollout or 0) - 1
        interval = 1 if self._settings.cluster.release_train else self._settings.checkpoint.save_interval
        if self._evaluates_first:
            self._evaluations.begin(self._done_rollouts)
        for rollout_id in range(self._start.plan.start_rollout, last + 1):
            planning = self._next_plan(rollout_id, publisher)
            if self._workers.keeper is not None:
                planning = engines_brought_back(planning, publisher, self._bring_back)
            plan = await self._workers.guarded(planning)
            if plan is None:
                return
            await self._give_memory_to_trainer()
            await self._revive_trainers()
            self._holds_published = False
            samples, reports = await self._workers.guarded(self._read_and_train(plan))
            reach(KillPoint.AFTER_TRAIN)
            await self._workers.training_completed(plan)
            await self._hooks.trained()
            self._done_rollouts = rollout_id + 1
            self._clock.trained()
            publication: Publication | None = None
            evaluates = self._evaluations.schedule.is_due(rollout_id + 1)
            if (interval is not None and (rollout_id + 1) % interval == 0) or (evaluates and rollout_id == last):
                await self._workers.guarded(self._commit(rollout_id, publisher.version))
            if (rollout_id < last or evaluates) and not self._interrupts.stop_asked:
                publication = await self._publish(publisher, rollout_id, is_due=evaluates)
                await self._release_trainers()
                if evaluates:
                    self._evaluations.begin(rollout_id + 1)
            self._clock.published()
            counts, stats = await asyncio.gather(self._workers.counts(), self._workers.stats())
            record = step_record(
                plan, last + 1, reports, publication, counts, stats, self._clock, self._report.numbers(samples)
            )
            append_durably(self._folder.metrics, msgspec.json.encode(record))
            is_told, warning = await self._report.tell(record, samples)
            if warning:
                self._view.note(f"warning: {warning}")
            if not is_told:
                self._view.step(record)
            self._evaluations.collect()
            self._stop_when_too_many_failed(counts)
            if self._interrupts.stop_asked:
                return

    async def _give_memory_to_trainer(self) -> None:
        """Where trainer and engines share devices, end requests; those of an evaluation are waited for."""
        if self._settings.cluster.engines_leave_memory:
            await self._workers.guarded(self._evaluations.responses_are_there(self._stop_asked))
        await self._workers.guarded(self._turns.give_to_trainer())

    async def _read_and_train(self, plan: BatchPlan) -> tuple[list[Sample], list[TrainReport]]:
        """Train a batch, and read the samples that its report needs; afterwards they may be gone."""
        return await asyncio.gather(self._report.samples(plan), self._workers.train(encode(plan)))

    async def _publish(self, publisher: WeightPublisher, rollout_id: int, *, is_due: bool) -> Publication | None:
        """Publish if it is due after this rollout batch, by `is_due` or by the interval of publications."""
        publication = None
        if is_due or (rollout_id + 1) % self._settings.weights.update_weights_interval == 0:
            await self._workers.guarded(self._evaluations.responses_are_there(self._stop_asked))
            reach(KillPoint.BEFORE_WEIGHTS)
            publication = await self._workers.guarded(publisher.publish())
            reach(KillPoint.AFTER_WEIGHTS)
            self._holds_published = publication.raised
            self._tell_of_engines(publication)
        if publication is None or not publication.raised:
            await self._workers.keep_version(publisher.version)
        return publication

    async def _bring_back(self, publisher: WeightPublisher) -> None:
        """Give engines that were replaced the version that serves; a new one to all where that can't be repeated."""
        publication = None
        if self._holds_published and publisher.repeats():
            publication = await publisher.catch_up()
        if publication is None or publisher.behind:
            await self._revive_trainers()
            publication = await publisher.publish()
            self._holds_published = publication.raised
            await self._workers.keep_version(publisher.version)
            await self._release_trainers()
        self._tell_of_engines(publication)

    def _tell_of_engines(self, publication: Publication) -> None:
        for address in publication.returned:
            self._view.note(f"Engine {address} serves again, with version {publication.version}.")
        for address, reason in publication.fenced.items():
            self._view.note(f"Engine {address} gets no requests until it confirms a version: {reason}")

    async def _next_plan(self, rollout_id: int, publisher: WeightPublisher) -> BatchPlan | None:
        """Wait for enough groups, plan, persist. None when the user asked to stop meanwhile."""
        data = self._settings.data
        batch = data.rollout_batch_size or 0
        await self._turns.trainer_leaves()
        self._clock.waits()
        groups = await wait_for_batch(
            self._workers,
            groups_to_wait_for(batch, (data.num_rollout or 0) - rollout_id),
            stall_timeout_s=self._settings.queue.stall_timeout,
            report=self._view.waiting,
            check=self._stop_when_too_many_failed,
            stop_asked=self._stop_asked,
        )
        if groups is None:
            return None
        self._clock.waited()
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
        stop_when_too_many_failed(self._settings, self._folder, self._at_start, counts)

    async def _commit(self, rollout_id: int, weight_version: int) -> None:
        """Model, optimizer and RNG of all ranks, then the queue state, then the record that makes them one."""
        if rollout_id < 0:
            return
        started = time.monotonic()
        shutil.rmtree(iteration_directory(self._directory, rollout_id), ignore_errors=True)
        make_folder(self._directory / "rollout")
        directory = str(self._directory)
        await self._workers.on_trainers(lambda trainer: trainer.save.remote(directory, rollout_id))
        await self._workers.save_prompt_source(rollout_id)
        state = await self._workers.queue_state()
        path = await asyncio.to_thread(
            write_commit,
            self._directory,
            rollout_id=rollout_id,
            branch=self._start.branch,
            parent=self._start.parent,
            weight_version=weight_version,
            run_id=self._settings.queue.rollout_queue_run_id,
            rollout_data_dir=str(self._folder.queue.parent),
            queue_state=state,
        )
        queue = self._settings.queue
        released = (
            releasable(self._folder.root, self._start.plan.directory, queue.rollout_queue_keep_commits)
            if queue.rollout_queue_online_gc
            else PositionRanges()
        )
        await self._workers.rotate_queue(state, released)
        self._committed = (self._directory, rollout_id)
        self._view.note(f"Committed rollout {rollout_id} in {time.monotonic() - started:.1f} s: {_relative(path)}")
        await self._export(rollout_id)

    async def _export(self, rollout_id: int) -> None:
        """The weights that were committed, for other programs."""
        template = self._settings.checkpoint.save_hf
        if template is None:
            return
        started = time.monotonic()
        target = Path(template.format(rollout_id=rollout_id)).absolute()
        await self._workers.on_trainers(lambda trainer: trainer.save_hf.remote(str(target)))
        self._view.note(f"Exported to {_relative(target)} in {time.monotonic() - started:.1f} s.")

    def _say_goodbye(self, identity: Identity) -> None:
        self._view.note(f"At end: {identity}")
        if self._workers.has_engines and self._done_rollouts > self._start.plan.start_rollout:
            self._view.note(bottleneck(self._clock.trainer_idle_share, self._clock.generator_idle_share))
        wanted = self._settings.data.num_rollout or 0
        if self._done_rollouts < wanted:
            self._view.note(
                f"Stopped after {self._done_rollouts} of {wanted} rollouts. To resume, run the same command again "
                f"(with --load {self._folder.root})."
            )


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
