"""What a session tells of itself: each batch to the log, the sinks and the user's own function; a stall; the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from pipeline.alarm_log import AlarmLog, disk_of
from pipeline.batch_report import BatchReport
from pipeline.messages import ProducerStats, QueueCounts, TrainReport
from pipeline.metric_sinks.sinks import MetricSinks
from pipeline.optional_records import OptionalRecords
from pipeline.planner import BatchPlan
from pipeline.producer_wiring import reward_name
from pipeline.progress import ProgressView, bottleneck, finished, stopped
from pipeline.publication import Publication
from pipeline.run_folder import RunFolder
from pipeline.step_metrics import StepClock, step_record
from pipeline.stream_shares import StreamShares
from pipeline.supervision import StallRecord, write_stall
from recovery.accounting import Identity
from storage.contracts import PayloadPool
from storage.files import append_durably
from vime.settings.groups import Settings
from vime.utils.types import Sample


class SessionReport:
    """Numbers and words; it also holds the clock of the loop."""

    def __init__(
        self,
        settings: Settings,
        folder: RunFolder,
        view: ProgressView,
        sinks: MetricSinks,
        hook_args: Callable[[], Any],
        open_pool: Callable[[], PayloadPool],
        records: OptionalRecords,
    ) -> None:
        """`hook_args` and `open_pool` serve the user's own functions and the flags that look at samples.

        `records` are the session's own: what they lack is told with each batch.
        """
        self._records = records
        self._folder, self._view, self._sinks = folder, view, sinks
        self._num_rollout = settings.data.num_rollout or 0
        has_own_engines = settings.engine.rollout_external_engine_addrs is None
        self._num_engine_gpus = settings.cluster.num_rollout_gpus if has_own_engines else 0
        salts = settings.weights.prefix_cache_salt == "version"
        self.clock = StepClock(StreamShares(salts_prefixes=salts, reward=reward_name(settings)))
        queue_root = folder.root if settings.queue.is_in_memory else folder.queue
        self._alarms = AlarmLog(view.note, partial(disk_of, queue_root))
        self._batch = BatchReport(settings, hook_args, open_pool)

    async def samples(self, plan: BatchPlan) -> list[Sample]:
        """Those that the report of this batch needs."""
        return await self._batch.samples(plan)

    async def batch(
        self,
        plan: BatchPlan,
        reports: Sequence[TrainReport],
        publication: Publication | None,
        counts: QueueCounts,
        stats: Sequence[ProducerStats],
        samples: list[Sample],
    ) -> None:
        """Record a batch that was trained, and tell of it."""
        numbers = self._batch.numbers(samples)
        record = self._alarms.with_alarms(
            step_record(
                plan,
                self._num_rollout,
                reports,
                publication,
                counts,
                stats,
                self.clock,
                numbers,
                num_engine_gpus=self._num_engine_gpus,
                unwritten=self._records.unwritten,
            )
        )
        line = partial(append_durably, self._folder.metrics, msgspec.json.encode(record))
        self._records.write(self._folder.metrics.name, line, tries_again=True)
        is_told, warning = await self._batch.tell(record, samples)
        if warning:
            self._view.note(f"warning: {warning}")
        self._sinks.batch(record, is_told=is_told)
        if not is_told:
            self._view.step(record)
        self._alarms.tell()

    def stall(self, record: StallRecord) -> None:
        """The session doesn't go on."""
        self._view.note(f"No progress for {record.quiet_s:.0f} s: {record.words}.")
        write_stall(self._folder.stalls, record)

    def end(self, identity: Identity, done_rollouts: int, *, names_bottleneck: bool) -> None:
        """The session has ended by itself or as asked."""
        self._view.note(f"At end: {identity}")
        if names_bottleneck:
            shares = self.clock.shares
            idle = self.clock.trainer_idle_share, self.clock.generator_idle_share
            self._view.note(bottleneck(*idle, shares.reward_time, shares.reward))
        self._alarms.tell_at_end()
        if done_rollouts < self._num_rollout:
            self._view.note(stopped(done_rollouts, self._num_rollout))
        elif self._num_rollout:
            self._view.note(finished(self._num_rollout, self._folder.root))
