"""When too many groups were set aside for the run to go on."""

from __future__ import annotations

import logging
import textwrap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from pipeline.messages import QueueCounts
from recovery.accounting import Identity
from storage.dead_letters import letters_folder, read_letters
from vime.errors import StorageError, TooManyFailuresError
from vime.rollout.dynamic_filter import without_rejections
from vime.settings.groups import Settings

logger = logging.getLogger(__name__)

MIN_DROPPED_GROUPS = 8
"""Fewer say nothing about the whole: in a small run one bad prompt is a large fraction."""
BATCHES_FOR_NOTHING = 4
_NAMED_REASONS = 3
_LONGEST_MESSAGE = 300
"""Characters of a letter's message that are repeated."""


def stop_when_too_many_failed(settings: Settings, run: Path, at_start: Identity, counts: QueueCounts) -> None:
    """Raises `TooManyFailuresError`."""
    dropped, generated = this_session(counts, at_start)
    check_failed_fraction(
        without_rejections(dropped), generated, allowed=settings.rollout.rollout_max_failed_fraction, run=run
    )
    accepted = counts.trained + counts.pending - at_start.trained - at_start.pending
    check_some_accepted(dropped, accepted, batch=settings.data.rollout_batch_size or 1, run=run)


def this_session(counts: QueueCounts, at_start: Identity) -> tuple[dict[str, int], int]:
    """Groups that this session has set aside, by reason, and all that it has worked on.

    Those of earlier sessions don't count: their cause may be repaired, and the run must be able to go on.
    """
    dropped = Counter(counts.dropped)
    dropped.subtract(at_start.dropped)
    return dict(+dropped), counts.generated - at_start.generated + at_start.in_flight


def check_failed_fraction(dropped: Mapping[str, int], num_generated: int, *, allowed: float, run: Path) -> None:
    """Judge the groups that a session has set aside (reason -> groups) against all that it has worked on.

    Raises:
        TooManyFailuresError: there are at least `MIN_DROPPED_GROUPS`, and more than the fraction `allowed`; the
            message names the most frequent reasons and the command that lists the groups.
    """
    total = sum(dropped.values())
    if total < MIN_DROPPED_GROUPS or total <= allowed * num_generated:
        return
    raise TooManyFailuresError(
        f"{total} of {num_generated} groups were set aside, more than --rollout-max-failed-fraction {allowed} allows. "
        f"{_most_frequent(dropped, run)}",
        next_step=f"`vime queue dead {run} --traces` shows each with its trace. Correct the function or the records, "
        "and run the same command again.",
    )


def check_some_accepted(dropped: Mapping[str, int], num_accepted: int, *, batch: int, run: Path) -> None:
    """Refuse to go on when a session has set groups aside, for whatever reason, and accepted none.

    `--rollout-max-failed-fraction 1` allows any fraction, but a run that never gets a batch of `batch` groups together
    would wait for ever.

    Raises:
        TooManyFailuresError: `BATCHES_FOR_NOTHING` batches' worth of groups came to nothing; the message names the most
            frequent reasons.
    """
    total = sum(dropped.values())
    if num_accepted or total < max(MIN_DROPPED_GROUPS, BATCHES_FOR_NOTHING * batch):
        return
    raise TooManyFailuresError(
        f"0 of {total} groups were accepted. {_most_frequent(dropped, run)}",
        next_step=f"Correct the reward or the filter; `vime queue dead {run} --traces` shows the samples that failed.",
    )


def _most_frequent(dropped: Mapping[str, int], run: Path) -> str:
    frequent = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))[:_NAMED_REASONS]
    words = f"Most frequent reasons: {', '.join(f'{reason} ({count})' for reason, count in frequent)}."
    newest = _newest_message(run, frequent[0][0]) if frequent else ""
    return f"{words} The newest {frequent[0][0]}: {newest}" if newest else words


def _newest_message(run: Path, reason: str) -> str:
    """What the newest letter with the reason says, on one line.

    Empty where there is none, as for a filter's, or where letters can't be read: why the run ends is not lost for that.
    """
    try:
        letters, _ = read_letters(letters_folder(run))
    except StorageError as error:
        logger.warning("the letters of the groups that were set aside are not told: %s", error)
        return ""
    message = next((letter.message for letter in reversed(letters) if letter.reason == reason), "")
    return textwrap.shorten(message, _LONGEST_MESSAGE, placeholder=" ...")
