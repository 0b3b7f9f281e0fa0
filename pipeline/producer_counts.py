"""What a producer has done so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.messages import ProducerStats
from pipeline.request_gate import RequestGate
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
    cached_prompt_tokens: int = 0
    prompt_tokens: int = 0

    def answered(self, samples: Sequence[Sample], *, accepted: bool) -> None:
        """The queue took a published group, or refused it because its lease had ended."""
        if not accepted:
            self.groups_stale += 1
            return
        self.groups_published += 1
        self.samples_published += len(samples)
        self.tokens_generated += sum(sample.response_length for sample in samples)
        self.spanning_samples += sum(len({version for version, _, _ in sample.version_spans}) > 1 for sample in samples)
        self.cached_prompt_tokens += sum(sample.prefix_cache_info.cached_tokens for sample in samples)
        self.prompt_tokens += sum(sample.prefix_cache_info.total_prompt_tokens for sample in samples)

    def stats(
        self, gate: RequestGate, *, blocked_s: float, failed_samples: Mapping[str, int], drifted_tokens: int
    ) -> ProducerStats:
        """With what is known of requests and failures."""
        return ProducerStats(
            groups_published=self.groups_published,
            samples_published=self.samples_published,
            tokens_generated=self.tokens_generated,
            spanning_samples=self.spanning_samples,
            groups_aborted=self.groups_aborted,
            groups_stale=self.groups_stale,
            in_flight_requests=gate.num_requests,
            idle_s=gate.idle_s(),
            blocked_s=blocked_s,
            wall_s=gate.wall_s(),
            failed_samples=dict(failed_samples),
            drifted_tokens=drifted_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            prompt_tokens=self.prompt_tokens,
        )
