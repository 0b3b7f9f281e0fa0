"""When a waiting run counts as stalled, and what each side then waits for. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.messages import ProducerStats, QueueCounts
from vime.counted import agreeing, counted
from vime.errors import StalledError


class StallWatch:
    """Measures how long no group has been accepted while the trainer waits; times are monotonic seconds."""

    def __init__(self, timeout_s: float, started_s: float) -> None:
        self._timeout_s = timeout_s
        self._since_s = started_s
        self._num_accepted: int | None = None

    def check(self, counts: QueueCounts, stats: Sequence[ProducerStats], batch: int, now_s: float) -> None:
        """To be called at intervals during a wait for `batch` groups.

        Raises:
            StalledError: no group was accepted for longer than the timeout.
        """
        num_accepted = counts.pending + counts.trained
        if num_accepted != self._num_accepted:
            if self._num_accepted is not None:
                self._since_s = now_s
            self._num_accepted = num_accepted
        quiet_s = now_s - self._since_s
        if quiet_s > self._timeout_s:
            raise StalledError(
                f"No group arrived for {quiet_s:.0f} s, --stall-timeout is {self._timeout_s:g}. The trainer waits for "
                f"{counted(batch, 'group')}, {counts.pending} {agreeing(counts.pending, 'is')} there"
                f"{f' and {set_aside_words(counts.dropped)}' if counts.dropped else ''}. "
                f"{_what_producers_wait_for(counts, stats)}",
                next_step="Look at the logs of engines and producers in the run folder. The same command resumes; "
                "raise --stall-timeout when a group may take longer.",
            )


def set_aside_words(dropped: Mapping[str, int]) -> str:
    """`5 were set aside (2 engine, 3 reward_raised)`, of reason -> groups."""
    total = sum(dropped.values())
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
    return f"{total} {agreeing(total, 'was')} set aside" + (f" ({reasons})" if reasons else "")


def _what_producers_wait_for(counts: QueueCounts, stats: Sequence[ProducerStats]) -> str:
    return " ".join([_what_they_do(counts, stats), *counts.notices])


def _what_they_do(counts: QueueCounts, stats: Sequence[ProducerStats]) -> str:
    requests = sum(stat.in_flight_requests for stat in stats)
    if requests:
        return (
            f"The producers wait for the engines: {counted(requests, 'request')} of "
            f"{counted(counts.in_flight, 'group')} {agreeing(requests, 'is')} unanswered."
        )
    if counts.in_flight:
        return (
            f"The producers have {counted(counts.in_flight, 'group')} in flight but no request at an engine: they wait "
            "for the reward function, or to be let on after a publication."
        )
    if counts.backpressured:
        return "The producers have nothing in flight: the queue hands out no more groups."
    waiting = f"{counted(counts.fresh, 'prompt')} {agreeing(counts.fresh, 'waits')}"
    return f"The producers have nothing in flight, {waiting} to be handed out."
