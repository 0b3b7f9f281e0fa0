"""From which commit a rollout is trained again, and which rollouts lead from there to it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vime.errors import NoRunError


@dataclass(frozen=True)
class TrainedRollout:
    """One rollout batch, named by the session that trained it."""

    branch: str
    rollout_id: int


@dataclass(frozen=True)
class ReplayLine:
    """What a replay trains."""

    commit: TrainedRollout | None
    """The newest commit before the rollout; None: the weights that the run began with."""
    rollouts: list[TrainedRollout]
    """All after that, the wanted one last."""


def replay_line(
    chain: Sequence[tuple[str, int | None]],
    commits: Mapping[str, Sequence[int]],
    trained: frozenset[TrainedRollout],
    rollout_id: int,
) -> ReplayLine:
    """The replay of `rollout_id` along `chain`, the sessions that lead to it (see `recovery.branch.ancestry`).

    `commits` are the rollouts after which each session committed, `trained` all that were trained.

    Raises:
        NoRunError: the rollout, or one between the commit and it, was not trained along the chain.
    """
    line = [TrainedRollout(_owner(chain, number), number) for number in range(rollout_id + 1)]
    if not line or line[-1] not in trained:
        known = sorted({item.rollout_id for item in trained if item.branch in {name for name, _ in chain}})
        span = f"it trained {known[0]} to {known[-1]}" if known else "it trained none"
        raise NoRunError(
            f"Rollout {rollout_id} was not trained along this line of sessions; {span}.",
            next_step="Choose one of these, or with --branch another session (`vime queue history RUN` lists them).",
        )
    committed = [item for item in line[:-1] if item.rollout_id in commits.get(item.branch, ())]
    commit = committed[-1] if committed else None
    following = line[0 if commit is None else commit.rollout_id + 1 :]
    missing = [item.rollout_id for item in following if item not in trained]
    if missing:
        raise NoRunError(
            f"Rollout {rollout_id} follows on rollout {missing[0]}, of which there is no record.",
            next_step="Choose a later rollout.",
        )
    return ReplayLine(commit, following)


def _owner(chain: Sequence[tuple[str, int | None]], rollout_id: int) -> str:
    """The session of the chain whose rollout it is: the oldest that counts so far."""
    return next(name for name, last in chain if last is None or rollout_id <= last)
