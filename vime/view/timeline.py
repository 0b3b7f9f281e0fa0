"""What each process did when, from the clocks of `metrics.jsonl`, commits and dead letters. Pure.

Waiting, training, committing and publishing follow each other and end at the line's time; with --async-save a commit
goes on beside what follows. The pause of the engines is at the end of a publication. Generation and reward go on beside
all this: the colour of one is as strong as its tokens per second, that of the other as the share of the samples' time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeline.incidents import Incident
from pipeline.progress import StepRecord
from pipeline.supervision import StallRecord
from vime.view.metrics import Evaluation


@dataclass(frozen=True)
class Interval:
    """A stretch of time of one process. Unix seconds."""

    kind: str
    """generate, reward, wait, train, save, publish, pause, evaluate, stall, outage (of an engine), failure (of a
    sample), start (of a session) or end (of one, by an error)."""
    start_s: float
    seconds: float
    words: str
    intensity: float = 1.0
    """From 0 to 1."""


def timeline(
    steps: Sequence[StepRecord],
    evaluations: Sequence[Evaluation] = (),
    commits: Mapping[int, float] | None = None,
    failures: Sequence[tuple[float, str]] = (),
    stalls: Sequence[StallRecord] = (),
    incidents: Sequence[Incident] = (),
) -> list[Interval]:
    """Intervals of some batches. `commits` maps rollout -> Unix time of its record; `failures` are (time, words)."""
    fastest = max((step.generated_tokens_per_s for step in steps), default=0.0)
    end = max((step.time_s + step.step_s for step in steps), default=0.0)
    saved = {rollout: time_s for rollout, time_s in (commits or {}).items() if time_s <= end}
    found = [interval for step in steps for interval in _of_step(step, fastest, saved.get(step.rollout_id))]
    begin = min((interval.start_s for interval in found), default=0.0)
    found += [
        Interval("evaluate", e.time_s - e.seconds, e.seconds, f"evaluation after {e.rollouts_before} batches")
        for e in evaluations
        if begin <= e.time_s
    ]
    found += [
        Interval("stall", stall.time_s - stall.quiet_s, stall.quiet_s, stall.words)
        for stall in stalls
        if begin <= stall.time_s
    ]
    found += list(_starts(steps))
    found += [each for each in _of_incidents(incidents, end) if begin <= each.start_s + each.seconds]
    found += [Interval("failure", time_s, 0.0, words) for time_s, words in failures if begin <= time_s]
    return found


def _starts(steps: Sequence[StepRecord]) -> Iterator[Interval]:
    """Where a later session goes on, at the beginning of its first batch."""
    for before, step in pairwise(steps):
        if step.branch != before.branch:
            began = step.time_s - step.publish_s - step.train_s - step.wait_s
            yield Interval("start", began, 0.0, f"batch {step.rollout_id}: session {step.branch} goes on")


def _of_incidents(incidents: Sequence[Incident], end_s: float) -> Iterator[Interval]:
    """An outage lasts until the engine serves again or the next session begins, or else until `end_s`."""
    out: dict[str, Incident] = {}
    for incident in incidents:
        over = list(out) if incident.kind == "session" else [incident.subject]
        yield from (_outage(out.pop(name), incident.time_s) for name in over if name in out)
        if incident.kind == "engine" and incident.text:
            out[incident.subject] = incident
        elif incident.kind == "ended":
            yield Interval("end", incident.time_s, 0.0, incident.text)
    yield from (_outage(incident, max(end_s, incident.time_s)) for incident in out.values())


def _outage(incident: Incident, until_s: float) -> Interval:
    return Interval("outage", incident.time_s, until_s - incident.time_s, incident.text)


def _of_step(step: StepRecord, fastest: float, committed_s: float | None) -> Iterator[Interval]:
    """`committed_s` is when the record of the batch's commit was written, None without one."""
    trained = step.time_s - step.publish_s
    train = trained - step.train_s
    wait = train - step.wait_s
    batch = f"batch {step.rollout_id}"
    rate = step.generated_tokens_per_s
    if rate > 0:
        words = f"{batch}: {rate:.0f} tokens/s generated"
        yield Interval("generate", wait, step.step_s, words, max(0.1, rate / fastest))
    if step.reward_time_share > 0:
        spent = f"{batch}: samples spent {step.reward_time_share:.0%} of their time in the reward {step.reward}"
        yield Interval("reward", wait, step.step_s, spent.rstrip(), max(0.1, step.reward_time_share))
    yield Interval("wait", wait, step.wait_s, f"{batch}: the trainer waited {step.wait_s:.2f} s for groups")
    yield Interval("train", train, step.train_s, f"{batch}: trained in {step.train_s:.2f} s")
    publish = trained
    if committed_s is not None and committed_s >= trained:
        yield Interval("save", trained, committed_s - trained, f"{batch}: committed in {committed_s - trained:.2f} s")
        publish = committed_s if committed_s <= step.time_s else trained
    published_s = step.time_s - publish
    if step.pause_s > 0 or step.update_weights_wire_bytes > 0:
        yield Interval("publish", publish, published_s, f"{batch}: published in {published_s:.2f} s")
    if step.pause_s > 0:
        pause = min(step.pause_s, published_s)
        yield Interval("pause", step.time_s - pause, pause, f"{batch}: engines stood still for {step.pause_s:.3f} s")
