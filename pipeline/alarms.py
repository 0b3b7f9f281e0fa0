"""What is wrong with a run, each with its threshold and what to do. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pipeline.progress import StepRecord
from vime.counted import counted

GAP = "train_rollout_logprob_abs_diff"
ENTROPY = "entropy_loss"


class Alarm(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    name: str
    """A word: stall, gap, staleness, replay, failures, truncation, entropy, signal, numbers, disk, batch."""
    text: str
    """What was found, and the threshold."""
    what_to_do: str


@dataclass(frozen=True)
class AlarmLimits:
    """Thresholds. Those of shares and log-probabilities hold for the mean of the last `window` batches."""

    window: int = 5
    gap_nats: float = 0.2
    """Mean absolute difference of the sampler's and the trainer's log-probability."""
    staleness_versions: int = 8
    truncated_share: float = 0.25
    signal_share: float = 0.1
    dropped_share: float = 0.01
    """Of all groups that were ever leased."""
    entropy_share: float = 0.2
    """Of the entropy in the first `window` batches."""
    free_disk_bytes: int = 5 << 30
    free_disk_share: float = 0.05


def find_alarms(
    steps: Sequence[StepRecord],
    *,
    stall: tuple[float, str] | None = None,
    dead_letters: Mapping[str, int] | None = None,
    disk: tuple[int, int] | None = None,
    limits: AlarmLimits | None = None,
) -> list[Alarm]:
    """The alarms of a run at its newest batch.

    `steps` are the batches that count, ascending. `stall` is for how many seconds nothing went on since the newest, and
    who waits for whom. `dead_letters` maps reason -> letters, where they are known better than from the newest batch.
    `disk` is (free, total) bytes of the file system under the queue.
    """
    chosen = limits or AlarmLimits()
    alarms: list[Alarm] = []
    if stall is not None:
        alarms.append(_stall(*stall))
    if steps:
        alarms += _numbers(steps[-1])
        alarms += _gap(steps, chosen)
        alarms += _staleness(steps, chosen)
        alarms += _replay(steps[-1])
        alarms += _truncation(steps, chosen)
        alarms += _entropy(steps, chosen)
        alarms += _signal(steps, chosen)
        alarms += [
            Alarm("batch", f"Batch {steps[-1].rollout_id}: {text}", "Look at the samples that it names.")
            for text in steps[-1].alarms
            if "Routes were replayed" not in text
        ]
    alarms += _failures(steps, dead_letters, chosen)
    if disk is not None:
        alarms += _disk(*disk, chosen)
    return alarms


def _stall(quiet_s: float, words: str) -> Alarm:
    return Alarm(
        "stall",
        f"Nothing went on for {quiet_s:.0f} s: {words}.",
        "The last link is what all others wait for; its log is under logs/ in the run folder.",
    )


def _numbers(step: StepRecord) -> Iterator[Alarm]:
    broken = sorted(name for name, value in step.train.items() if not math.isfinite(value))
    if broken:
        yield Alarm(
            "numbers",
            f"Batch {step.rollout_id}: {', '.join(broken)} {'is' if len(broken) == 1 else 'are'} not finite.",
            "Stop, resume from a commit before it with --ckpt-step, and lower --lr or --clip-grad.",
        )


def _gap(steps: Sequence[StepRecord], limits: AlarmLimits) -> Iterator[Alarm]:
    gap = _recent([step.train.get(GAP) for step in steps], limits)
    if gap is not None and gap > limits.gap_nats:
        yield Alarm(
            "gap",
            f"Sampler and trainer differ by {gap:.3g} nats a token; alarm above {limits.gap_nats:g}.",
            "`vime parity` with the flags of the job tells whether engine and trainer compute the same. If they do, "
            "the samples are old: lower --max-staleness or --update-weights-interval, or lower --lr.",
        )


def _staleness(steps: Sequence[StepRecord], limits: AlarmLimits) -> Iterator[Alarm]:
    oldest = max(step.staleness_max for step in steps[-limits.window :])
    if oldest > limits.staleness_versions:
        yield Alarm(
            "staleness",
            f"Samples of up to {counted(oldest, 'version')} ago were trained; alarm above {limits.staleness_versions}.",
            "Set --max-staleness, or lower --rollout-queue-max-groups, so that less waits in the queue.",
        )


def _replay(step: StepRecord) -> Iterator[Alarm]:
    fraction = step.train.get("routing_replay_fraction")
    if fraction is not None and fraction < 1.0:
        detail = next((text for text in step.alarms if "Routes were replayed" in text), "")
        yield Alarm(
            "replay",
            f"Batch {step.rollout_id}: the experts of {fraction:.1%} of the tokens were replayed; alarm below 100%. "
            + detail,
            "Routes are missing: check that the engine returns routed experts for every sample, and that generate "
            "functions keep them.",
        )


def _truncation(steps: Sequence[StepRecord], limits: AlarmLimits) -> Iterator[Alarm]:
    share = _recent([step.truncated_share for step in steps], limits)
    if share is not None and share > limits.truncated_share:
        yield Alarm(
            "truncation",
            f"{share:.0%} of the samples were cut off at the length limit; alarm above {limits.truncated_share:.0%}.",
            "Raise --rollout-max-response-len, or look at such samples: they may never come to an end.",
        )


def _entropy(steps: Sequence[StepRecord], limits: AlarmLimits) -> Iterator[Alarm]:
    if len(steps) < 2 * limits.window:
        return
    values = [step.train.get(ENTROPY) for step in steps]
    first, last = _recent(values[: limits.window], limits), _recent(values, limits)
    if first is not None and last is not None and first > 0 and last < limits.entropy_share * first:
        yield Alarm(
            "entropy",
            f"Entropy fell from {first:.3g} to {last:.3g} nats; alarm below {limits.entropy_share:.0%} of the "
            f"beginning.",
            "The policy explores no more: lower --lr, raise --entropy-coef or the sampling temperature, or widen "
            "--eps-clip-high.",
        )


def _signal(steps: Sequence[StepRecord], limits: AlarmLimits) -> Iterator[Alarm]:
    share = _recent([step.signal_share for step in steps], limits)
    if share is not None and share < limits.signal_share:
        yield Alarm(
            "signal",
            f"Rewards differ in {share:.0%} of the groups; alarm below {limits.signal_share:.0%}.",
            "The other groups teach nothing: choose prompts that are neither too easy nor too hard, or filter groups "
            "with --dynamic-sampling-filter-path.",
        )


def _failures(
    steps: Sequence[StepRecord], dead_letters: Mapping[str, int] | None, limits: AlarmLimits
) -> Iterator[Alarm]:
    failed = Counter(dead_letters if dead_letters is not None else steps[-1].failed_samples if steps else {})
    dropped = Counter(steps[-1].dropped if steps else {})
    generated = steps[-1].generated if steps else 0
    reasons = ", ".join(f"{count} {reason}" for reason, count in failed.most_common())
    share = dropped.total() / generated if generated else 0.0
    if failed.total() and (not generated or failed.total() / generated > limits.dropped_share):
        yield Alarm(
            "failures",
            f"Failed samples: {reasons}; alarm above {limits.dropped_share:.0%} of the {counted(generated, 'group')}.",
            "`vime queue dead RUN --traces` shows each with its trace.",
        )
    elif share > limits.dropped_share:
        words = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
        yield Alarm(
            "failures",
            f"{share:.0%} of the groups were dropped ({words}); alarm above {limits.dropped_share:.0%}.",
            "`vime queue tasks RUN --state dropped` lists them.",
        )


def _disk(free: int, total: int, limits: AlarmLimits) -> Iterator[Alarm]:
    needed = max(limits.free_disk_bytes, limits.free_disk_share * total)
    if free < min(needed, total):
        yield Alarm(
            "disk",
            f"{free / 2**30:.1f} GiB of {total / 2**30:.1f} GiB are free under the queue; alarm below "
            f"{needed / 2**30:.1f} GiB.",
            "Free space, or resume with --rollout-queue-online-gc and a smaller --rollout-queue-keep-commits.",
        )


def _recent(values: Sequence[float | None], limits: AlarmLimits) -> float | None:
    """Mean of the last batches that have a finite value; None where none has."""
    found = [value for value in values[-limits.window :] if value is not None and math.isfinite(value)]
    return sum(found) / len(found) if found else None
