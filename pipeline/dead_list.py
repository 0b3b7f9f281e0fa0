"""Dead letters of a run, joined with what became of their groups, for `vime queue dead`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

import msgspec

from pipeline.lineage import state_words
from recovery.branch_line import BranchLine
from recovery.run_location import RunLocation
from storage.columns import decode_group
from storage.dead_letters import DeadLetter, read_letters
from storage.plain_json import to_plain_json
from storage.pool import Pool
from storage.queue_view import QueueView
from vime.errors import StorageError
from vime.outputs import output_error


class DeadRow(msgspec.Struct, frozen=True):
    """A letter and what became of its group."""

    letter: DeadLetter
    state: str
    """Of the group now: dropped, or waiting, pending, trained, ... where another attempt went on; unknown where the
    queue is not on the disk."""
    requeued_as: int | None
    """The group that takes up the prompt again."""


class ReasonCount(msgspec.Struct, frozen=True):
    """One reason."""

    reason: str
    num_letters: int
    num_groups_dropped: int
    """Groups that the queue has dropped for it, in all segments."""


class DeadList(msgspec.Struct, frozen=True):
    """`vime queue dead`."""

    reasons: list[ReasonCount]
    letters: list[DeadRow]
    num_matching: int
    """Also those beyond the limit."""
    unreadable: list[str]
    """Lines of the letters' files that can't be read."""


def list_dead(
    location: RunLocation, *, reasons: Collection[str], groups: Collection[int], limit: int | None
) -> DeadList:
    """Letters, newest first; empty `reasons` and `groups` stand for any. Raises `StorageError`."""
    letters, unreadable = read_letters(location.dead_letters)
    matching = [
        letter
        for letter in reversed(letters)
        if (not reasons or letter.reason in reasons) and (not groups or letter.group_index in groups)
    ]
    fates = _Fates(location)
    shown = [DeadRow(letter, *fates.of(letter.group_index)) for letter in matching[:limit]]
    dropped, by_letter = fates.dropped, Counter(letter.reason for letter in letters)
    counts = [ReasonCount(reason, by_letter[reason], dropped[reason]) for reason in {*dropped, *by_letter}]
    counts.sort(key=lambda count: (-count.num_groups_dropped, -count.num_letters, count.reason))
    return DeadList(counts, shown, len(matching), [str(problem) for problem in unreadable])


def export_dead(location: RunLocation, found: DeadList, path: Path) -> None:
    """Write the letters as JSON lines, each with its samples' full content, to the new file `path`.

    Raises as `output_error`, also when `path` exists.
    """
    try:
        with path.open("xb") as file, ExitStack() as stack:
            pool = stack.enter_context(Pool.open(location.pool)) if location.has_queue else None
            for row in found.letters:
                file.write(msgspec.json.encode(_with_samples(row, pool)) + b"\n")
    except OSError as error:
        raise output_error("--export", path, error) from error


def _with_samples(row: DeadRow, pool: Pool | None) -> DeadRow:
    ref = row.letter.payload_ref
    if ref is None or pool is None:
        return row
    try:
        stored = pool.read_group(ref)
    except StorageError:
        return row  # collected since; the letter still says what happened
    samples = [to_plain_json(sample) for sample in decode_group(stored.header, stored.columns)]
    return msgspec.structs.replace(row, letter=msgspec.structs.replace(row.letter, samples=samples))


class _Fates:
    """What became of groups, where the queue is on the disk."""

    def __init__(self, location: RunLocation) -> None:
        self._view = QueueView(location.pool) if location.has_queue else None
        self.dropped: Counter[str] = Counter()
        self._successors: dict[int | None, int] = {}
        if self._view is not None:
            self._line = BranchLine(location.root, self._view.control_dir)
            self.dropped = self._view.facts().dropped_by_reason()
            groups = (group for segment in self._view.all_segments() for group in segment.groups())
            self._successors = {group.requeued_from: group.group_index for group in groups}

    def of(self, group_index: int) -> tuple[str, int | None]:
        """State and successor of a group."""
        segment = None if self._view is None else self._view.with_group(group_index)
        group = None if segment is None else segment.group(group_index)
        state = "unknown" if group is None else state_words(group, self._line)
        return state, self._successors.get(group_index)
