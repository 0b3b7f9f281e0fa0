"""The numbers of one rollout batch, from its plan, the reports and the clocks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from pipeline.messages import ProducerStats, QueueCounts, TrainReport
from pipeline.optional_records import Unwritten, unwritten_words
from pipeline.planner import BatchPlan
from pipeline.progress import ROUTES_WORDS, StepRecord
from pipeline.publication import Publication
from pipeline.sample_metrics import sample_metrics
from pipeline.stream_shares import StreamShares
from vime.counted import counted

_Key = TypeVar("_Key", str, int)


class StepClock:
    """Splits the run loop's time into waiting, training and publishing. Seconds."""

    def __init__(self, shares: StreamShares | None = None) -> None:
        """`shares` is kept up to date by `step_record`."""
        self.shares = shares or StreamShares()
        self._begin = self._mark = time.monotonic()
        self._total_wait_s = 0.0
        self.wait_s = self.train_s = self.publish_s = 0.0
        self.generator_idle_share = 0.0
        self.last_tokens_generated = 0

    def start(self) -> None:
        """The loop begins."""
        self._begin = self._mark = time.monotonic()

    def waits(self) -> None:
        """The trainer begins to wait for groups."""
        self._mark = time.monotonic()

    def waited(self) -> None:
        """The groups are there."""
        self.wait_s = self._lap()
        self._total_wait_s += self.wait_s

    def trained(self) -> None:
        """The batch is trained."""
        self.train_s = self._lap()

    def published(self) -> None:
        """Commit and publication, if any, are done."""
        self.publish_s = self._lap()

    @property
    def step_s(self) -> float:
        return self.wait_s + self.train_s + self.publish_s

    @property
    def trainer_idle_share(self) -> float:
        return self._total_wait_s / max(time.monotonic() - self._begin, 1e-9)

    def _lap(self) -> float:
        now = time.monotonic()
        lap, self._mark = now - self._mark, now
        return lap


def step_record(
    plan: BatchPlan,
    num_rollout: int,
    train_reports: Sequence[TrainReport],
    publication: Publication | None,
    counts: QueueCounts,
    stats: Sequence[ProducerStats],
    clock: StepClock,
    reports: Mapping[str, float],
    *,
    num_engine_gpus: int = 0,
    unwritten: Sequence[Unwritten] = (),
) -> StepRecord:
    """Assemble the record of one rollout batch; updates the clock's view of the generators.

    `num_engine_gpus` 0 where vime has started no engine. `unwritten` is of the driver's records.
    """
    rewards = np.asarray([sample.reward for sample in plan.samples])
    ages = [sample.age_versions for sample in plan.samples if not sample.is_of_unknown_version] or [0]
    lengths = np.asarray([sample.response_length for sample in plan.samples])
    clock.generator_idle_share = sum(stat.idle_s for stat in stats) / max(sum(stat.wall_s for stat in stats), 1e-9)
    generated = sum(stat.tokens_generated for stat in stats)
    clock.shares.update(stats, publication)
    fresh_tokens, clock.last_tokens_generated = generated - clock.last_tokens_generated, generated
    return StepRecord(
        branch=plan.branch,
        rollout_id=plan.rollout_id,
        num_rollout=num_rollout,
        policy_version=plan.policy_version,
        time_s=time.time(),
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        signal_share=_signal_share(plan),
        response_tokens_mean=float(lengths.mean()),
        truncated_share=float(np.mean([sample.truncated for sample in plan.samples])),
        staleness_mean=float(np.mean(ages)),
        staleness_max=max(ages),
        trained_tokens_per_s=int(lengths.sum()) / max(clock.step_s, 1e-9),
        generated_tokens_per_s=fresh_tokens / max(clock.step_s, 1e-9),
        wait_s=clock.wait_s,
        train_s=clock.train_s,
        publish_s=clock.publish_s,
        pause_s=0.0 if publication is None else publication.pause_s,
        publication_s=0.0 if publication is None else publication.prepare_s + publication.change_s,
        update_weights_wire_bytes=0 if publication is None else publication.wire_bytes,
        update_weights_density=0.0 if publication is None else publication.density,
        step_s=clock.step_s,
        trainer_idle_share=clock.trainer_idle_share,
        generator_idle_share=clock.generator_idle_share,
        generated=counts.generated,
        trained=counts.trained,
        pending=counts.pending,
        in_flight=counts.in_flight,
        dropped=counts.dropped,
        spanning_samples=sum(stat.spanning_samples for stat in stats),
        groups_aborted=sum(stat.groups_aborted for stat in stats),
        failed_samples=dict(sum((Counter(stat.failed_samples) for stat in stats), Counter())),
        drifted_tokens=sum(stat.drifted_tokens for stat in stats),
        response_tokens_median=float(np.median(lengths)),
        response_tokens_min=int(lengths.min()),
        response_tokens_max=int(lengths.max()),
        zero_std=_zero_std(plan),
        prefix_cache_hit_rate=sum(stat.cached_prompt_tokens for stat in stats)
        / max(1, sum(stat.prompt_tokens for stat in stats)),
        stale_prefix_share=clock.shares.stale_prefix,
        reward_time_share=clock.shares.reward_time,
        reward=clock.shares.reward,
        reward_by_source=_reward_by_source(plan),
        train=train_reports[0].metrics,
        reports=dict(reports),
        alarms=[alarm] if (alarm := routes_alarm(train_reports)) else [],
        unwritten=unwritten_words([*(each for report in train_reports for each in report.unwritten), *unwritten]),
        sample_metrics=sample_metrics(plan, step_s=clock.step_s, num_engine_gpus=num_engine_gpus),
    )


def routes_alarm(reports: Sequence[TrainReport]) -> str | None:
    """Which samples' tokens took experts in turn where the sampler's should have been replayed."""
    samples = sorted({index for report in reports for index in report.samples_without_routes})
    fraction = min((report.metrics.get("routing_replay_fraction", 1.0) for report in reports), default=1.0)
    if not samples and fraction >= 1.0:
        return None
    named = f"{counted(len(samples), 'sample')} without routes: {', '.join(map(str, samples))}."
    return f"{ROUTES_WORDS} for {fraction:.1%} of the tokens of the last step; {named}"


def _reward_by_source(plan: BatchPlan) -> dict[str, float]:
    rewards = _collected((sample.source_name, sample.reward) for sample in plan.samples)
    return {source: float(np.mean(values)) for source, values in sorted(rewards.items())}


def _zero_std(plan: BatchPlan) -> dict[str, int]:
    rewards = _collected((sample.group, sample.reward) for sample in plan.samples)
    counts = Counter(f"{values[0]:.1f}" for values in rewards.values() if len(set(values)) == 1)
    return dict(sorted(counts.items()))


def _signal_share(plan: BatchPlan) -> float:
    advantages = _collected((sample.group, sample.advantage) for sample in plan.samples)
    return float(np.mean([len(set(values)) > 1 for values in advantages.values()]))


def _collected(items: Iterable[tuple[_Key, float]]) -> dict[_Key, list[float]]:
    """Key -> its values, in order."""
    found: dict[_Key, list[float]] = {}
    for key, value in items:
        found.setdefault(key, []).append(value)
    return found
