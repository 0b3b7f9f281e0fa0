"""What rollout functions return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vime.utils.types import Sample


@dataclass
class RolloutFnTrainOutput:
    """Groups of samples for training."""

    samples: Sequence[Sequence[Any]]
    """Groups of samples; in place of a sample there may be a list of them, the segments of one rollout."""
    metrics: Mapping[str, Any] | None = None
    on_accepted: Callable[[], None] | None = None
    """Called when the queue has accepted the groups."""


@dataclass
class RolloutFnEvalOutput:
    """Results of an evaluation."""

    data: Mapping[str, Mapping[str, Any]]
    """Name of a data set -> its rewards, truncated and samples, each a list."""
    metrics: Mapping[str, Any] | None = None


def flat_group(group: Sequence[Any]) -> list[Sample]:
    """The samples of a group with its lists of segments."""
    return [sample for item in group for sample in (item if isinstance(item, Sequence) else [item])]
