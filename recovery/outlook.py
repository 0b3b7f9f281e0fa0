"""What a session finds in the queue and how it will count it, read off the disk before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recovery.accounting import Identity, count_identity
from recovery.branch import Branch
from recovery.commit import read_queue_state
from storage.columns import summary_from_header
from storage.pool import Pool
from storage.positions import PositionRanges
from storage.queue_view import QueueView
from storage.refs import PoolRef
from storage.retention import Retention
from storage.step_log import trained_on_disk
from storage.summary import GroupSummary
from vime.counted import counted
from vime.errors import CommitError, StorageError
from vime.utils.types import Sample

_FINISHED = {Sample.Status.COMPLETED.value, Sample.Status.TRUNCATED.value}


@dataclass(frozen=True)
class Outlook:
    """The queue as the newest session left it, and as the next one counts it."""

    before: Identity
    after: Identity
    num_rolled_back: int
    """Groups that were trained and are pending again."""
    num_partial: int
    """Groups of which responses are begun."""
    tokens_to_prefill: int
    """Of their unfinished members, prompt and response: no cache outlives an engine."""

    @property
    def num_waiting(self) -> int:
        """Groups with samples that the next session trains or goes on with."""
        return self.after.pending + self.num_partial

    def words(self) -> list[str]:
        """A sentence each."""
        told = [f"Goes on with: {self.after}"]
        if str(self.before) != str(self.after):
            told.insert(0, f"Found: {self.before}")
        if self.num_rolled_back:
            told.append(
                f"{counted(self.num_rolled_back, 'group')} trained after the commit went back to pending, to be "
                "trained again."
            )
        if self.num_partial:
            told.append(
                f"{counted(self.tokens_to_prefill, 'token')} to prefill again, in {counted(self.num_partial, 'group')} "
                "with a response begun."
            )
        return told


def look_ahead(
    run: Path, pool_root: Path, branches: Sequence[Branch], trained: Sequence[tuple[int, int]]
) -> Outlook | None:
    """What a session that counts `trained` as trained finds in the queue in `pool_root`; None without one.

    Reads open segments and the newest part of the step log. Raises `StorageError` where these can't be read.
    """
    if not (pool_root / "vime" / "queue.json").exists():
        return None
    view = QueueView(pool_root)
    facts, released = view.facts(), Retention(view.control_dir).released
    before, after = _trained_before(run, view.control_dir, branches), PositionRanges(trained)
    unfinished = [_unfinished_tokens(summary) for summary in _summaries(pool_root, view.partial_refs())]
    return Outlook(
        before=count_identity(facts, before, released),
        after=count_identity(facts, after, released),
        num_rolled_back=len(before.minus(after)),
        num_partial=len(unfinished),
        tokens_to_prefill=sum(unfinished),
    )


def _trained_before(run: Path, control_dir: Path, branches: Sequence[Branch]) -> PositionRanges:
    """What the newest session and its ancestors had trained."""
    if not branches:
        return PositionRanges()
    tip = branches[-1]
    trained = trained_on_disk(control_dir, tip.branch)
    if tip.parent is not None:
        folder = next((b.directory for b in branches if b.branch == tip.parent.branch), tip.directory)
        try:
            trained = PositionRanges(
                [*read_queue_state(run / folder, tip.parent.rollout_id).trained, *trained.ranges()]
            )
        except CommitError:
            return trained
    return trained


def _summaries(pool_root: Path, refs: Sequence[PoolRef]) -> list[GroupSummary]:
    if not refs:
        return []
    with Pool.open(pool_root) as pool:
        found = []
        for ref in refs:
            try:
                found.append(summary_from_header(pool.read_header(ref)))
            except StorageError:
                continue  # its producer will say so, and generate it anew
        return found


def _unfinished_tokens(summary: GroupSummary) -> int:
    members = zip(summary.total_lengths, summary.statuses, strict=True)
    return sum(length for length, status in members if status not in _FINISHED)
