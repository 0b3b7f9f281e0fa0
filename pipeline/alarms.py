"""What is wrong with a run, each with its threshold and what to do. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.alarm import Alarm, level_above, level_below
from pipeline.incidents import Incident
from pipeline.progress import ROUTES_WORDS, StepRecord
from vime.counted import counted

GAP = "train_rollout_logprob_abs_diff"
ENTROPY = "entropy_loss"


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
    stale_prefix_share: float = 0.05
    """Of the prompt tokens."""
    reward_time_share: float = 0.5
    """Of the time that samples take, where the trainer waits for them."""
    wait_share: float = 0.3
    """Of the trainer's time, from which on it counts as waiting."""
    free_disk_bytes: int = 5 << 30
    free_disk_share: float = 0.05


def find_alarms(
    steps: Sequence[StepRecord],
    *,
    incidents: Sequence[Incident] = (),
    stall: tuple[float, str] | None = None,
    dead_letters: Mapping[str, int] | None = None,
    messages: Mapping[str, str] | None = None,
    disk: tuple[int, int] | None = None,
    limits: AlarmLimits | None = None,
) -> list[Alarm]:
    """The alarms of a run at its newest batch.

    `steps` are the batches that count, ascending; those between the first `window` and the last `window` may be left
    out. `incidents` are those that are not over. `stall` is for how many seconds nothing went on since the newest, and
    who waits for whom. `dead_letters` maps reason -> letters, where they are known better than from the newest batch,
    and `messages` reason -> what the newest of them says.
    `disk` is (free, total) bytes of the file system under the queue.
    """
    chosen = limits or AlarmLimits()
    alarms = [Alarm(incident.kind, incident.text, incident.what_to_do) for incident in incidents]
    if stall is not None:
        alarms.append(_stall(*stall))
    if steps:
        alarms += _numbers(steps[-1])
        alarms += _prefix(steps, chosen)
        alarms += _gap(steps, chosen)
        alarms += _reward(steps, chosen)
        alarms += _staleness(steps, chosen)
        alarms += _replay(steps[-1])
        alarms += _truncation(steps, chosen)
        alarms += _entropy(steps, chosen)
        alarms += _signal(steps, chosen)
        alarms += [
            Alarm("batch", f"Batch {steps[-1].rollout_id}: {text}", "Look at the samples that it names.")
            for text in steps[-1].alarms
            if ROUTES_WORDS not in text
        ]
        alarms += _unwritten(steps[-1])
    alarms += _failures(steps, dead_letters, messages or {}, chosen)
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
            "the samples are old: lower --max-staleness or --update-weights-interval, or lower --lr. `vime view RUN` "
            "orders samples by their gap and colours their tokens by it.",
            level_above(gap, limits.gap_nats),
        )


def _prefix(steps: Sequence[StepRecord], limits: AlarmLimits) -> Iterator[Alarm]:
    share = _recent([step.stale_prefix_share for step in steps], limits)
    if share is not None and share > limits.stale_prefix_share:
        gap = _recent([step.train.get(GAP) for step in steps], limits)
        differ = "" if gap is None else f" Sampler and trainer differ by {gap:.3g} nats a token."
        yield Alarm(
            "prefix",
            f"Stale prefixes: {share:.0%} of the prompt tokens came from prefix caches that may hold what older "
            f"weights computed; alarm above {limits.stale_prefix_share:.0%}.{differ}",
            "Resume with --prefix-cache-salt version, or empty the caches at each publication with "
            "--flush-cache-interval 1.",
            level_above(share, limits.stale_prefix_share),
        )


def _reward(steps: Sequence[StepRecord], limits: AlarmLimits) -> Iterator[Alarm]:
    if len(steps) < 2:
        return  # the first batch is always waited for, whatever its reward takes
    share = _recent([step.reward_time_share for step in steps], limits)
    wait = _recent([step.wait_s / step.step_s if step.step_s > 0 else None for step in steps], limits)
    if share is None or wait is None or share <= limits.reward_time_share or wait <= limits.wait_share:
        return
    yield Alarm(
        "reward",
        f"Samples spent {share:.0%} of their time in the reward {steps[-1].reward}, and the trainer waited {wait:.0%} "
        f"of its time for them; alarm above {limits.reward_time_share:.0%} and {limits.wait_share:.0%}.",
        "Make the reward faster or answer more calls at once (--reward-workers, --reward-concurrency, more servers "
        "behind --rm-url); --reward-timeout bounds a call.",
        level_above(wait, limits.wait_share),
    )


def _staleness(steps: Sequence[StepRecord], limits: AlarmLimits) -> Iterator[Alarm]:
    oldest = max(step.staleness_max for step in steps[-limits.window :])
    if oldest > limits.staleness_versions:
        yield Alarm(
            "staleness",
            f"Samples of up to {counted(oldest, 'version')} ago were trained; alarm above {limits.staleness_versions}.",
            "Set --max-staleness, or lower --rollout-queue-max-groups, so that less waits in the queue.",
            level_above(oldest, limits.staleness_versions),
        )


def _replay(step: StepRecord) -> Iterator[Alarm]:
    fraction = step.train.get("routing_replay_fraction", 1.0)
    detail = next((text for text in step.alarms if ROUTES_WORDS in text), "")
    if fraction < 1.0 or detail:
        replayed = f"the experts of {fraction:.1%} of the tokens were replayed; alarm below 100%."
        yield Alarm(
            "replay",
            f"Batch {step.rollout_id}: {replayed if fraction < 1.0 else 'routes are missing.'} {detail}".rstrip(),
            "Routes are missing: check that the engine returns routed experts for every sample, and that generate "
            "functions keep them.",
            level_below(fraction, 1.0),
        )


def _truncation(steps: Sequence[StepRecord], limits: AlarmLimits) -> Iterator[Alarm]:
    share = _recent([step.truncated_share for step in steps], limits)
    if share is not None and share > limits.truncated_share:
        yield Alarm(
            "truncation",
            f"{share:.0%} of the samples were cut off at the length limit; alarm above {limits.truncated_share:.0%}.",
            "Raise --rollout-max-response-len, or look at such samples: they may never come to an end.",
            level_above(share, limits.truncated_share),
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
            level_below(last, limits.entropy_share * first),
        )


def _signal(steps: Sequence[StepRecord], limits: AlarmLimits) -> Iterator[Alarm]:
    share = _recent([step.signal_share for step in steps], limits)
    if share is None or share >= limits.signal_share:
        return
    newest = steps[-limits.window :]
    same = newest[-1].reward_mean
    if all(step.reward_std == 0 and step.reward_mean == same for step in newest):
        yield Alarm(
            "signal",
            f"Every sample of the last {counted(len(newest), 'batch')} got the reward {same:g}, so nothing is learned.",
            "Read a response: `vime sample show RUN 0`. Either the reward doesn't read the answer that is there, or "
            "the prompts are too hard or too easy for the model.",
            level_below(share, limits.signal_share),
        )
    else:
        yield Alarm(
            "signal",
            f"Rewards differ in {share:.0%} of the groups; alarm below {limits.signal_share:.0%}.",
            "The other groups teach nothing: choose prompts that are neither too easy nor too hard, or filter groups "
            "with --dynamic-sampling-filter-path.",
            level_below(share, limits.signal_share),
        )


def _failures(
    steps: Sequence[StepRecord],
    dead_letters: Mapping[str, int] | None,
    messages: Mapping[str, str],
    limits: AlarmLimits,
) -> Iterator[Alarm]:
    failed = Counter(dead_letters if dead_letters is not None else steps[-1].failed_samples if steps else {})
    dropped = Counter(steps[-1].dropped if steps else {})
    generated = steps[-1].generated if steps else 0
    reasons = ", ".join(f"{count} {reason}" for reason, count in failed.most_common())
    share = dropped.total() / generated if generated else 0.0
    if failed.total() and (not generated or failed.total() / generated > limits.dropped_share):
        message = messages.get(failed.most_common(1)[0][0], "")
        yield Alarm(
            "failures",
            f"Failed samples: {reasons}; alarm above {limits.dropped_share:.0%} of the {counted(generated, 'group')}."
            + (f" {message}" if message else ""),
            "`vime queue dead RUN --traces` shows each with its trace.",
            level_above(failed.total() / generated if generated else 1.0, limits.dropped_share),
        )
    elif share > limits.dropped_share:
        words = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
        yield Alarm(
            "failures",
            f"{share:.0%} of the groups were dropped ({words}); alarm above {limits.dropped_share:.0%}.",
            "`vime queue tasks RUN --state dropped` lists them.",
            level_above(share, limits.dropped_share),
        )


def _disk(free: int, total: int, limits: AlarmLimits) -> Iterator[Alarm]:
    needed = max(limits.free_disk_bytes, limits.free_disk_share * total)
    if free < min(needed, total):
        yield Alarm(
            "disk",
            f"{free / 2**30:.1f} GiB of {total / 2**30:.1f} GiB are free under the queue; alarm below "
            f"{needed / 2**30:.1f} GiB.",
            "Free space, or resume with --rollout-queue-online-gc and a smaller --rollout-queue-keep-commits.",
            level_below(free, min(needed, total)),
        )


def _unwritten(step: StepRecord) -> Iterator[Alarm]:
    if step.unwritten:
        yield Alarm(
            "records",
            " ".join(step.unwritten),
            "Training goes on without them. Free space or repair the mount; a resume writes them again.",
        )


def _recent(values: Sequence[float | None], limits: AlarmLimits) -> float | None:
    """Mean of the last batches that have a finite value; None where none has."""
    found = [value for value in values[-limits.window :] if value is not None and math.isfinite(value)]
    return sum(found) / len(found) if found else None
