"""Whether trainer and sampler give the same tokens the same log-probabilities, and which known fault it is if not.

The trainer scores the sampled tokens as it always does, and once more under each fault that would change what the
sampler reports. A fault is named where what it predicts is much nearer to the sampler than the trainer itself is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

LogProbs = npt.NDArray[np.floating[Any]]

AGREEMENT = 1e-4
"""Mean difference up to which there is nothing to explain: the rounding of float32 sums."""
EXPLAINED = 3.0
"""A fault is named when it makes the mean difference at least so many times smaller."""


class Fault(Enum):
    """What makes trainer and sampler differ though each works."""

    RAW_LOG_PROBS = "raw_log_probs"
    NO_TEMPERATURE = "no_temperature"
    SCALED_LOG_PROBS = "scaled_log_probs"
    HEAD_PRECISION = "head_precision"
    STALE_WEIGHTS = "stale_weights"
    PREFIX_CACHE = "prefix_cache"


MEANINGS = {
    Fault.RAW_LOG_PROBS: "the sampler's log-probabilities are those before temperature and truncation",
    Fault.NO_TEMPERATURE: "the sampler samples without the temperature",
    Fault.SCALED_LOG_PROBS: "the sampler divides log-probabilities, not logits, by the temperature",
    Fault.HEAD_PRECISION: "one side multiplies the output head in float32, the other in bfloat16",
    Fault.STALE_WEIGHTS: "the sampler still has the weights that it was started with",
    Fault.PREFIX_CACHE: "only what was served from the prefix cache differs",
}
REMEDIES = {
    Fault.RAW_LOG_PROBS: "Start the engine with --logprobs-mode processed_logprobs, as vime does.",
    Fault.NO_TEMPERATURE: "See which sampling parameters reach the engine; --rollout-temperature says what should.",
    Fault.SCALED_LOG_PROBS: "See how the engine processes logits; a plug-in of yours may change them.",
    Fault.HEAD_PRECISION: "Multiply the output head in float32 on both sides.",
    Fault.STALE_WEIGHTS: "See the engine's log for the last publication, then restart the run.",
    Fault.PREFIX_CACHE: "Keep --prefix-cache-salt version, or give --vllm-no-enable-prefix-caching.",
}


@dataclass(frozen=True, kw_only=True)
class Readings:
    """Log-probabilities of the same N sampled tokens, all [N], natural log."""

    sampler: LogProbs
    trainer: LogProbs
    """As the trainer scores them in training."""
    raw: LogProbs
    """By the trainer at temperature 1 over the whole vocabulary."""
    unscaled: LogProbs
    """By the trainer at temperature 1 among the recorded nucleus; without nuclei the same as `raw`."""
    other_head: LogProbs
    """By the trainer with the output head in the other of float32 and bfloat16."""
    start_weights: LogProbs | None = None
    """By the trainer under the weights that the sampler was started with; None where they are the trainer's own."""
    cached: npt.NDArray[np.bool_]
    """Whether part of the token's prompt came from the sampler's prefix cache."""
    temperature: float


class Gap(msgspec.Struct, frozen=True):
    """Absolute differences of log-probabilities over tokens."""

    mean: float
    p99: float
    max: float

    def __str__(self) -> str:
        return f"mean {self.mean:.2g}, p99 {self.p99:.2g}, max {self.max:.2g}"


class Finding(msgspec.Struct, frozen=True):
    """How near the sampler is to what one fault predicts."""

    fault: str
    gap: Gap | None
    """None where the fault can't be told from health here."""
    differs: bool
    """Whether this fault is the one that explains the difference."""
    meaning: str


class ParityReport(msgspec.Struct, frozen=True):
    """Trainer against sampler on one set of tokens."""

    num_tokens: int
    gap: Gap
    fault: str | None
    """The fault that explains the difference; None where there is none to explain, or no known one does."""
    findings: list[Finding]


def compare(readings: Readings) -> ParityReport:
    """How far the two are apart and which fault explains it. `readings` must have a token."""
    whole = _gap(readings.sampler, readings.trainer)
    gaps = _predicted_gaps(readings)
    fault = _explanation(readings, whole, gaps)
    findings = [Finding(each.value, gaps.get(each), each is fault, MEANINGS[each]) for each in Fault]
    return ParityReport(len(readings.sampler), whole, None if fault is None else fault.value, findings)


def _predicted_gaps(readings: Readings) -> dict[Fault, Gap]:
    """For each fault that would show on these tokens."""
    predictions = {
        Fault.RAW_LOG_PROBS: readings.raw,
        Fault.NO_TEMPERATURE: readings.unscaled,
        Fault.SCALED_LOG_PROBS: readings.raw / readings.temperature,
        Fault.HEAD_PRECISION: readings.other_head,
        Fault.STALE_WEIGHTS: readings.start_weights,
    }
    gaps = {
        fault: _gap(readings.sampler, predicted)
        for fault, predicted in predictions.items()
        if predicted is not None and np.abs(predicted - readings.trainer).mean() > AGREEMENT
    }
    if readings.cached.any() and not readings.cached.all():
        fresh = ~readings.cached
        gaps[Fault.PREFIX_CACHE] = _gap(readings.sampler[fresh], readings.trainer[fresh])
    return gaps


def _explanation(readings: Readings, whole: Gap, gaps: dict[Fault, Gap]) -> Fault | None:
    explaining = {fault: gap.mean for fault, gap in gaps.items() if gap.mean * EXPLAINED <= whole.mean}
    if whole.mean <= AGREEMENT or not explaining:
        return None
    nearest = min(explaining, key=lambda fault: explaining[fault])
    unscaled = (Fault.RAW_LOG_PROBS, Fault.NO_TEMPERATURE)
    if nearest in unscaled and np.array_equal(readings.raw, readings.unscaled):
        # Both report the same numbers; which tokens were drawn tells the distribution that they were drawn from.
        drawn_with_temperature = float((readings.trainer - readings.raw).sum()) > 0
        return Fault.RAW_LOG_PROBS if drawn_with_temperature else Fault.NO_TEMPERATURE
    return nearest


def _gap(one: LogProbs, other: LogProbs) -> Gap:
    differences = np.abs(one.astype(np.float64) - other)
    return Gap(float(differences.mean()), float(np.quantile(differences, 0.99)), float(differences.max()))
