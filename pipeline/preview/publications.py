"""The first weight publications of a session: when each happens and whether it drops the engines' KV. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.flush import publication_flushes


@dataclass(frozen=True)
class PlannedPublication:
    """One publication; `after_rollout` is None for the one at the start."""

    version: int
    after_rollout: int | None
    flushes: bool


def first_publications(
    *,
    start_version: int,
    start_rollout: int,
    num_rollout: int,
    flush_interval: int,
    publish_every: int,
    count: int = 10,
) -> list[PlannedPublication]:
    """Up to `count` publications of a session that starts at `start_rollout` with weights `start_version`.

    One comes at the start, the others after every `publish_every` rollout batches but not after the last.
    """
    moments: list[int | None] = [None]
    moments += [rollout for rollout in range(start_rollout, num_rollout - 1) if (rollout + 1) % publish_every == 0]
    return [
        PlannedPublication(version, moment, publication_flushes(version, start_version, flush_interval))
        for version, moment in enumerate(moments[:count], start=start_version + 1)
    ]
