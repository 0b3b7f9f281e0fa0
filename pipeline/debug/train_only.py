"""--debug-train-only: stored samples are trained by real ranks, without engines, producers and queue."""

from __future__ import annotations

import dataclasses
import shutil
from functools import partial
from pathlib import Path

import msgspec

from pipeline.alarm_log import AlarmLog
from pipeline.cluster import Cluster
from pipeline.debug.stored import StoredRollouts
from pipeline.enqueue_needs import enqueue_needs
from pipeline.interrupt import Ending, Interrupts
from pipeline.job_supervision import supervise_ranks
from pipeline.messages import NO_QUEUE, encode
from pipeline.model_config import model_config
from pipeline.packing_settings import packing_settings
from pipeline.plan_settings import plan_settings
from pipeline.planner import plan_batch
from pipeline.progress import ProgressView
from pipeline.run_folder import RunFolder
from pipeline.stages import Stage
from pipeline.step_metrics import StepClock, step_record
from pipeline.workers import Workers
from recovery.branch import read_branches
from recovery.commit import TRACKER, commit_path, committed_rollouts, iteration_directory, read_commit
from recovery.commit_lock import kept_commit
from recovery.restore import parse_load
from storage.checks import check_enqueue
from storage.columns import encode_group
from storage.files import append_durably, write_atomically
from vime.errors import RestoreError, SettingsError
from vime.settings.groups import Settings
from vime.settings.rules.quantities import demand_of

BRANCH = "debug"


def train_stored(settings: Settings, view: ProgressView) -> Ending:
    """Train rollouts from their files to --num-rollout, from the weights, or the commit, that --load names.

    Checkpoints are written like a run's, but are no commits. Errors come out as `VimeError`.
    """
    folder = RunFolder.of(settings)
    if read_branches(folder.root):
        raise RestoreError(
            f"--save {folder.root} holds a run, whose files a debug job would mix with its own.",
            next_step="Give another --save; --load may name the run.",
        )
    template, num_rollout = settings.debug.load_debug_rollout_data, settings.data.num_rollout
    if template is None or num_rollout is None:
        raise SettingsError(
            "Training stored samples needs --load-debug-rollout-data and --num-rollout.", next_step="Give both."
        )
    start = _commit_of_load(settings)
    first = 0 if start is None else start[1] + 1
    folder.make()
    needs = enqueue_needs(settings, model_config(settings))
    with (
        StoredRollouts(
            template,
            scratch=folder.root / "debug_data",
            group_size=settings.data.n_samples_per_prompt,
            encode=partial(
                encode_group,
                reward_key=settings.rollout.reward_key,
                num_experts=None if needs.routes is None else needs.routes.num_experts,
            ),
            check=partial(check_enqueue, needs=needs),
            first_rollout=first,
            subsample=settings.debug.load_debug_rollout_data_subsample,
        ) as stored,
        kept_commit(start),
        Interrupts(view) as interrupts,
        Cluster(demand_of(_without_engines(settings, stored)), 0) as cluster,
    ):
        session = _Session(_without_engines(settings, stored), folder, cluster, view, interrupts, stored)
        return interrupts.run(session.run(start, range(first, num_rollout)))


def _without_engines(settings: Settings, stored: StoredRollouts) -> Settings:
    """The same job on the pool of the stored samples."""
    root = stored.pool.root
    if root.name != "pool":
        raise SettingsError(f"{root}: allowed is a pool in a folder named pool.", next_step="Rename the folder.")
    queue = dataclasses.replace(
        settings.queue,
        rollout_data_transport="straw",
        rollout_data_dir=str(root.parent),
        rollout_queue_run_id=stored.pool.run_id,
    )
    return dataclasses.replace(settings, queue=queue, cluster=settings.cluster.without_engines())


def _commit_of_load(settings: Settings) -> tuple[Path, int] | None:
    """Folder and rollout of the commit that --load names; None where it names none. Raises `CommitError`."""
    load = settings.checkpoint.load
    if load is None:
        return None
    folder, exact = parse_load(load)
    rollouts = committed_rollouts(folder)
    if not rollouts:
        return None
    wanted = exact if exact is not None else settings.checkpoint.ckpt_step
    chosen = rollouts[-1] if wanted is None else wanted
    read_commit(commit_path(folder, chosen))
    return folder.absolute(), chosen


class _Session:
    """One job."""

    def __init__(
        self,
        settings: Settings,
        folder: RunFolder,
        cluster: Cluster,
        view: ProgressView,
        interrupts: Interrupts,
        stored: StoredRollouts,
    ) -> None:
        self._settings, self._folder, self._view, self._interrupts = settings, folder, view, interrupts
        self._stored = stored
        self._workers = Workers(settings, folder, cluster)
        self._clock = StepClock()
        self._alarms = AlarmLog(view.note)

    async def run(self, start: tuple[Path, int] | None, rollouts: range) -> Ending:
        workers = self._workers
        try:
            packing = packing_settings(self._settings, await workers.start_trainers())
            if start is None:
                await workers.trainers.load_start()
            else:
                directory, committed = start
                await workers.trainers.load(str(directory), committed)
                self._view.note(f"Training goes on from the commit of rollout {committed} in {directory}.")
            workers.trainers.watch()
            stages = supervise_ranks(self._settings.queue, workers, self._view.note, self._folder.stalls)
            self._clock.start()
            with self._interrupts.finishing_steps():
                for rollout_id in rollouts:
                    self._clock.waits()
                    groups = self._stored.batch(rollout_id)
                    self._clock.waited()
                    plan = plan_batch(
                        groups,
                        plan_settings(self._settings, packing, len(groups)),
                        branch=BRANCH,
                        rollout_id=rollout_id,
                        policy_version=max((v or 0 for g in groups for v in g.summary.max_versions), default=0),
                    )
                    stages.begin(Stage("trains", rollout_id + 1))
                    reports = await workers.guarded(workers.train(encode(plan)))
                    self._clock.trained()
                    stages.begin(Stage("saves a checkpoint", rollout_id + 1))
                    await self._save(rollout_id, last=rollout_id == rollouts[-1] or self._interrupts.stop_asked)
                    self._clock.published()
                    record = self._alarms.with_alarms(
                        step_record(plan, rollouts.stop, reports, None, NO_QUEUE, [], self._clock, {})
                    )
                    append_durably(self._folder.metrics, msgspec.json.encode(record))
                    self._view.step(record)
                    self._alarms.tell()
                    if self._interrupts.stop_asked:
                        return Ending.INTERRUPTED
            return Ending.DONE
        finally:
            await workers.stop()

    async def _save(self, rollout_id: int, *, last: bool) -> None:
        """A checkpoint, every --save-interval rollouts and after the last."""
        interval = self._settings.checkpoint.save_interval
        if interval is None or not (last or (rollout_id + 1) % interval == 0):
            return
        root = self._folder.root
        shutil.rmtree(iteration_directory(root, rollout_id), ignore_errors=True)
        saving = self._workers.on_trainers(lambda trainer: trainer.save.remote(str(root), rollout_id))
        await self._workers.guarded(saving)
        write_atomically(root / TRACKER, str(rollout_id).encode())
