"""Which results no commit needs that is kept: what online garbage collection may reclaim."""

from __future__ import annotations

from pathlib import Path

from recovery.commit import QueueState, committed_rollouts, read_queue_state
from recovery.run_on_disk import commit_folders
from storage.positions import PositionRanges
from vime.errors import CommitError


def releasable(run: Path, directory: str, num_kept: int) -> PositionRanges:
    """Positions whose payloads may go, by the commits of a run.

    Of `directory`, where the present branch commits, the newest `num_kept` commits are kept with all that came after
    them, so that a resume from one loses nothing. Of the folders of other branches they are kept with the groups that
    waited when they were written: what was generated later belongs to other branches. A commit that can't be read
    can't be chosen, and keeps nothing.
    """
    own = list(_newest_states(run / directory, num_kept).values())
    if not own:
        return PositionRanges()
    result = PositionRanges(own[-1].trained)
    for folder in commit_folders(run):
        if folder != directory:
            for state in _newest_states(run / folder, num_kept).values():
                result = result.minus(PositionRanges(state.accepted).minus(PositionRanges(state.trained)))
    return result


def last_releasable_rollout(run: Path, directory: str, num_kept: int) -> int | None:
    """The last rollout of `directory` whose payloads `releasable` lets go, None where it keeps all."""
    return min(_newest_states(run / directory, num_kept), default=None)


def _newest_states(folder: Path, count: int) -> dict[int, QueueState]:
    """Queue states of the newest commits of a folder by their rollout, newest first."""
    states: dict[int, QueueState] = {}
    for rollout_id in reversed(committed_rollouts(folder)):
        if len(states) == count:
            break
        try:
            states[rollout_id] = read_queue_state(folder, rollout_id)
        except CommitError:
            continue
    return states
