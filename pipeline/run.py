"""The run: restore, start, then wait - plan - train - publish - commit, until the last rollout."""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipeline.batch_wait import groups_to_wait_for, wait_for_batch
from pipeline.cluster import Cluster
from pipeline.coordinator import CoordinatorConfig
from pipeline.failed_fraction import check_failed_fraction, check_some_accepted
from pipeline.fixed_settings import fixed_settings
from pipeline.frozen_sources import check_sources
from pipeline.interrupt import Ending, Interrupts
from pipeline.messages import QueueCounts, encode
from pipeline.packing import PackingSettings
from pipeline.packing_settings import packing_settings
from pipeline.parity_verdict import engine_parity, refuse_difference
from pipeline.planner import BatchPlan, PlanSettings, ProcessedRewards, plan_batch, select_groups
from pipeline.progress import ProgressView, bottleneck
from pipeline.prompt_source import build_prompt_source, set_bad_prompts_aside, with_num_rollout
from pipeline.publisher import Publication, WeightPublisher
from pipeline.reward_post_process import FLAG, process_rewards
from pipeline.run_folder import RunFolder
from pipeline.session_lock import session_lock
from pipeline.session_plan import plan_session
from pipeline.step_metrics import StepClock, step_record
from pipeline.storage_proof import prove_here, prove_nodes
from pipeline.transports.promise import transport_words
from pipeline.weight_wiring import weight_transport
from pipeline.wiring import NUM_PRODUCERS, open_pool
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
from storage.queue_types import AcceptedGroup
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import RewardError
from vime.settings.groups import Settings
from vime.settings.import_paths import load_function
from vime.settings.parse import HookArgs
from vime.settings.record import settings_record
from vime.settings.resolve import Resolved
from vime.utils.kill_points import KillPoint, reach


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
    source = build_prompt_source(resolved.settings)
    resolved = with_num_rollout(resolved, source)
    settings = resolved.settings
    folder = RunFolder.of(settings)
    fixed = fixed_settings(settings, source)
    folder.make()
    with session_lock(folder):
        start = _prepare(settings, folder)
        hold_to_fixed(folder.root, fixed)
        for words in start.plan.words:
            view.note(words)
        for words in set_bad_prompts_aside(source, folder.bad_prompts):
            view.note(words)
        if start.plan.mode is RestoreMode.COMPLETE:
            return Ending.DONE
        for words in transport_words(settings, None if start.state is None else start.state.memory):
            view.note(words)
        check_sources(settings)
        if not settings.queue.is_in_memory:
            prove_here(folder.queue, settings.queue)
            claim_queue(folder.root, folder.queue, has_commits=start.commit is not None)
        _remove_leftovers(folder)
        write_atomically(folder.settings, settings_record(resolved))
        with (
            Interrupts(view) as interrupts,
            Cluster(settings.cluster, NUM_PRODUCERS, carries_samples=settings.queue.is_in_memory) as cluster,
        ):
            return interrupts.run(_Session(settings, folder, start, cluster, view, interrupts).run())


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
    left = (data.num_rollout or 0) - start.plan.start_rollout
    return CoordinatorConfig(
        branch=start.branch,
        trained=trained,
        groups_wanted=len(PositionRanges(trained)) + left * batch,
        max_groups=queue.rollout_queue_max_groups or 2 * batch,
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
    ) -> None:
        self._settings, self._folder, self._start = settings, folder, start
        self._view, self._interrupts = view, interrupts
        self._directory = folder.root / start.plan.directory
        self._workers = Workers(settings, folder, cluster)
        self._clock = StepClock()
        plan = start.plan
        self._committed: tuple[Path, int] | None = None
        """Folder and rollout of the newest commit."""
        if plan.commit_directory is not None and plan.commit_rollout is not None:
            self._committed = (folder.root / plan.commit_directory, plan.commit_rollout)
        self._done_rollouts = start.plan.start_rollout
        self._packing = PackingSettings(num_ranks=1)

    async def run(self) -> Ending:
        clients: list[EngineClient] = []
        try:
            publisher = await self._start_all(clients)
            with self._interrupts.finishing_steps():
                await self._train_all(publisher)
                failed = await self._workers.stop_producers()
                if self._committed is None or self._committed[1] != self._done_rollouts - 1:
                    await self._workers.guarded(self._commit(self._done_rollouts - 1, publisher.version))
            if failed is not None:
                raise failed
            self._say_goodbye(await self._workers.identity())
            done = self._done_rollouts >= (self._settings.data.num_rollout or 0)
            return Ending.DONE if done else Ending.INTERRUPTED
        finally:
            for client in clients:
                await client.close()
            await self._workers.stop()

    async def _start_all(self, clients: list[EngineClient]) -> WeightPublisher:
        workers = self._workers
        await prove_nodes(self._folder.queue, self._settings.queue)
        await workers.start_coordinator(coordinator_config(self._settings, self._start))
        self._at_start = await workers.identity()
        self._view.note(f"At start: {self._at_start}")
        addresses, _ = await asyncio.gather(workers.start_engines(self._view.waiting), self._start_trainers())
        await workers.start_producers(addresses)
        clients.extend(EngineClient(address) for address in addresses)
        weights = self._settings.weights
        publisher = WeightPublisher(
            clients,
            weight_transport(self._settings, workers),
            workers,
            start_version=await self._start_version(),
            flush_interval=weights.flush_cache_interval,
            timeout_s=weights.update_weight_timeout,
            compare_first=weights.check_weight_update_equal and self._start.commit is None,
        )
        append_branch(
            self._folder.root,
            Branch(self._start.branch, self._start.parent, self._start.plan.directory, publisher.version),
        )
        await workers.record_processes()
        if weights.check_weight_update_equal and self._start.commit is not None:
            self._view.note("--check-weight-update-equal compares nothing: this run goes on from a commit.")
        first = await workers.guarded(publisher.publish())
        if clients:
            self._view.note(f"Weights published as version {first.version} ({first.wire_bytes / 1e6:.1f} MB).")
            await workers.guarded(self._check_parity(addresses, first.fenced))
        await self._release_trainers()
        self._clock.start()
        return publisher

    async def _check_parity(self, addresses: Sequence[str], fenced: Collection[str]) -> None:
        """Compare each engine but the `fenced` with the trainer on a few sequences. Raises `ParityError`."""
        engine, rollout = self._settings.engine, self._settings.rollout
        if not engine.parity_probes:
            return
        found = []
        serving = {number: address for number, address in enumerate(addresses) if address not in fenced}
        probed = await self._workers.probe_engines(list(serving.values()))
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

    async def _revive_trainers(self) -> None:
        """Start the ranks again where they were released."""
        if not self._workers.trainers:
            await self._workers.guarded(self._start_trainers())
            await self._workers.record_processes()

    async def _start_version(self) -> int:
        """Versions never go back: also those that an abandoned session published, or wrote to disk, count."""
        committed = 0 if self._start.commit is None else self._start.commit.weight_version
        return max(committed, await self._workers.highest_version(), await self._workers.highest_version_on_disk())

    async def _train_all(self, publisher: WeightPublisher) -> None:
        last = (self._settings.data.num_rollout or 0) - 1
        interval = 1 if self._settings.cluster.release_train else self._settings.checkpoint.save_interval
        for rollout_id in range(self._start.plan.start_rollout, last + 1):
            plan = await self._workers.guarded(self._next_plan(rollout_id, publisher.version))
            if plan is None:
                return
            await self._revive_trainers()
            reports = await self._workers.guarded(self._workers.train(encode(plan)))
            reach(KillPoint.AFTER_TRAIN)
            await self._workers.training_completed(plan)
            self._done_rollouts = rollout_id + 1
            self._clock.trained()
            publication: Publication | None = None
            if interval is not None and (rollout_id + 1) % interval == 0:
                await self._workers.guarded(self._commit(rollout_id, publisher.version))
            if rollout_id < last and not self._interrupts.stop_asked:
                publication = await self._publish(publisher, rollout_id)
                await self._release_trainers()
            self._clock.published()
            counts, stats = await asyncio.gather(self._workers.counts(), self._workers.stats())
            record = step_record(plan, last + 1, reports, publication, counts, stats, self._clock)
            append_durably(self._folder.metrics, msgspec.json.encode(record))
            self._view.step(record)
            self._stop_when_too_many_failed(counts)
            if self._interrupts.stop_asked:
                return

    async def _publish(self, publisher: WeightPublisher, rollout_id: int) -> Publication | None:
        """Publish if it is due after this rollout batch."""
        publication = None
        if (rollout_id + 1) % self._settings.weights.update_weights_interval == 0:
            reach(KillPoint.BEFORE_WEIGHTS)
            publication = await self._workers.guarded(publisher.publish())
            reach(KillPoint.AFTER_WEIGHTS)
            for address, reason in publication.fenced.items():
                self._view.note(f"Engine {address} gets no requests until it confirms a version: {reason}")
        if publication is None or not publication.raised:
            await self._workers.keep_version(publisher.version)
        return publication

    async def _next_plan(self, rollout_id: int, policy_version: int) -> BatchPlan | None:
        """Wait for enough groups, plan, persist. None when the user asked to stop meanwhile."""
        data, objective = self._settings.data, self._settings.objective
        batch = data.rollout_batch_size or 0
        if self._settings.cluster.trainer_leaves_memory:
            await self._workers.rest_trainers()
        self._clock.waits()
        groups = await wait_for_batch(
            self._workers,
            groups_to_wait_for(batch, (data.num_rollout or 0) - rollout_id),
            stall_timeout_s=self._settings.queue.stall_timeout,
            report=self._view.waiting,
            check=self._stop_when_too_many_failed,
            stop_asked=lambda: self._interrupts.stop_asked,
        )
        if groups is None:
            return None
        self._clock.waited()
        settings = PlanSettings(
            rollout_batch_size=batch,
            rollouts_per_step=data.samples_per_step,
            packing=self._packing,
            normalize_rewards=objective.centers_rewards,
            normalize_std=objective.divides_by_std,
        )
        plan = plan_batch(
            groups,
            settings,
            branch=self._start.branch,
            rollout_id=rollout_id,
            policy_version=policy_version,
            processed=await self._processed_rewards(select_groups(groups, batch)),
        )
        reach(KillPoint.BEFORE_PLAN)
        await self._workers.record_plan(plan, encode(plan))
        reach(KillPoint.AFTER_PLAN)
        return plan

    async def _processed_rewards(self, groups: Sequence[AcceptedGroup]) -> ProcessedRewards | None:
        """What the user's function makes of the rewards; None without one. Raises `RewardError`."""
        path, timeout_s = self._settings.rollout.custom_reward_post_process_path, self._settings.rollout.reward_timeout
        if path is None:
            return None

        def process() -> ProcessedRewards:
            function = load_function(FLAG, path)
            with closing(open_pool(self._settings, self._workers.coordinator)) as pool:
                return process_rewards(groups, pool, function, HookArgs(self._settings))

        try:
            return await asyncio.wait_for(asyncio.to_thread(process), timeout_s)
        except TimeoutError as error:
            raise RewardError(
                f"{FLAG} took longer than {timeout_s:g} s.", next_step="Raise --reward-timeout if it needs longer."
            ) from error

    def _stop_when_too_many_failed(self, counts: QueueCounts) -> None:
        dropped, generated = this_session(counts, self._at_start)
        allowed = self._settings.rollout.rollout_max_failed_fraction
        check_failed_fraction(dropped, generated, allowed=allowed, run=self._folder.root)
        accepted = counts.trained + counts.pending - self._at_start.trained - self._at_start.pending
        batch = self._settings.data.rollout_batch_size or 1
        check_some_accepted(dropped, accepted, batch=batch, run=self._folder.root)

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
        if self._settings.cluster.num_engines:
            self._view.note(bottleneck(self._clock.trainer_idle_share, self._clock.generator_idle_share))
        wanted = self._settings.data.num_rollout or 0
        if self._done_rollouts < wanted:
            self._view.note(
                f"Stopped after {self._done_rollouts} of {wanted} rollouts. To resume, run the same command again "
                f"(with --load {self._folder.root})."
            )


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
