"""The identity: every generated group is trained, pending, in flight, or dropped with a reason."""

from __future__ import annotations

from collections import Counter

import msgspec

from storage.positions import PositionRanges
from storage.queue_types import QueueFacts


class Identity(msgspec.Struct, frozen=True):
    """Counts of prompt groups along one branch of history.

    `generated` is counted from the prompt cursor (groups handed out, less those never leased); the others from the
    state of each group, so that the two sides have independent sources.
    """

    generated: int
    trained: int
    pending: int
    in_flight: int
    dropped: dict[str, int]

    @property
    def holds(self) -> bool:
        return self.generated == self.trained + self.pending + self.in_flight + sum(self.dropped.values())

    def __str__(self) -> str:
        dropped = sum(self.dropped.values())
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items()))
        return (
            f"generated {self.generated} = trained {self.trained} + pending {self.pending} + in flight "
            f"{self.in_flight} + dropped {dropped}" + (f" ({reasons})" if reasons else "")
        ) + ("" if self.holds else "  [DOES NOT HOLD]")


RECLAIMED = "reclaimed"
"""Why groups are dropped that another branch trained, and whose samples went before this branch began."""


def count_identity(facts: QueueFacts, trained: PositionRanges, released: PositionRanges | None = None) -> Identity:
    """Count the groups of a queue, given the positions that the branch has trained and those that were released."""
    num_reclaimed = len((released or PositionRanges()).minus(trained))
    num_trained = sum(position in trained for position in facts.accepted.values())
    for segment in facts.closed:
        last = segment.first_position + segment.num_accepted - 1
        num_trained += trained.count_between(segment.first_position, last)
    return Identity(
        generated=facts.cursor.next_group_index - len(facts.fresh),
        trained=num_trained,
        pending=facts.num_accepted - num_trained - num_reclaimed,
        in_flight=len(facts.in_flight),
        dropped=dict(facts.dropped_by_reason() + Counter({RECLAIMED: num_reclaimed})),
    )
