"""What a producer has done so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vime.utils.types import Sample


@dataclass
class ProducerCounts:
    """Running totals."""

    groups_published: int = 0
    samples_published: int = 0
    tokens_generated: int = 0
    spanning_samples: int = 0
    groups_aborted: int = 0
    groups_stale: int = 0

    def answered(self, samples: Sequence[Sample], *, accepted: bool) -> None:
        """The queue took a published group, or refused it because its lease had ended."""
        if not accepted:
            self.groups_stale += 1
            return
        self.groups_published += 1
        self.samples_published += len(samples)
        self.tokens_generated += sum(sample.response_length for sample in samples)
        self.spanning_samples += sum(len({version for version, _, _ in sample.version_spans}) > 1 for sample in samples)
