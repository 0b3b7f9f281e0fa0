"""Records that help people and that a run can do without: what can't be written is counted and told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec

from vime.counted import counted
from vime.errors import StorageError

logger = logging.getLogger(__name__)


class Unwritten(msgspec.Struct, frozen=True):
    """What a record lacks."""

    record: str
    num_batches: int
    """Rollout batches of this session that are not in it."""
    why: str


class OptionalRecords:
    """Those of one process.

    A record that can't be written is left alone until the next session, so that it takes no space from what must be
    written; one that `tries_again`, as it needs little, is tried with each batch.
    """

    def __init__(self) -> None:
        self._unwritten: dict[str, Unwritten] = {}

    @property
    def unwritten(self) -> list[Unwritten]:
        """By record; empty while all is well."""
        return list(self._unwritten.values())

    def write(self, record: str, work: Callable[[], None], *, tries_again: bool = False) -> None:
        """Do the work that writes one batch into a record, unless that is left alone by now."""
        known = self._unwritten.get(record)
        if known is not None and not tries_again:
            self._lacks(record, known.why)
            return
        try:
            work()
        except (OSError, StorageError) as error:
            why = error.message if isinstance(error, StorageError) else str(error)
            logger.warning("the %s is not written: %s", record, why)
            self._lacks(record, why)

    def _lacks(self, record: str, why: str) -> None:
        known = self._unwritten.get(record)
        self._unwritten[record] = Unwritten(record, 1 if known is None else known.num_batches + 1, why)


def unwritten_words(unwritten: Iterable[Unwritten]) -> list[str]:
    """A sentence for each record, with the reason of the process that lacks most."""
    by_record: dict[str, list[Unwritten]] = {}
    for each in unwritten:
        by_record.setdefault(each.record, []).append(each)
    return [_words(found) for found in by_record.values()]


def _words(found: list[Unwritten]) -> str:
    most = max(found, key=lambda each: each.num_batches)
    where = f" on {len(found)} ranks" if len(found) > 1 else ""
    return f"The {most.record} lacks {counted(most.num_batches, 'batch')} of this session{where}: {most.why}"
