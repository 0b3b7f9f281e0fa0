"""Each known fault of a sampler is named, and nothing is named where there is nothing to explain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vime.algorithms.parity import AGREEMENT, Fault, Readings, compare

NUM_TOKENS, VOCABULARY, TEMPERATURE = 400, 50, 0.7


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


class Models:
    """Logits of a trainer, of the same trainer with a coarse head, and of older weights."""

    def __init__(self, temperature: float = TEMPERATURE) -> None:
        self.rng = np.random.default_rng(0)
        self.temperature = temperature
        self.logits = self.rng.normal(0, 2.5, (NUM_TOKENS, VOCABULARY))
        self.coarse = self.logits + self.rng.normal(0, 0.02, self.logits.shape)
        self.older = self.logits + self.rng.normal(0, 0.2, self.logits.shape)

    def draw(self, logits: np.ndarray, temperature: float) -> np.ndarray:
        """[N, 1] one token of each row."""
        gumbel = self.rng.gumbel(size=logits.shape)
        return (logits / temperature + gumbel).argmax(-1)[:, None]

    def readings(self, tokens: np.ndarray, sampler: np.ndarray, **changes: Any) -> Readings:
        """What the trainer finds for `tokens`, beside what the `sampler` says [N, V]."""

        def of(log_probs: np.ndarray) -> np.ndarray:
            return np.take_along_axis(log_probs, tokens, -1)[:, 0]

        raw = of(log_softmax(self.logits))
        known = {
            "sampler": of(sampler),
            "trainer": of(log_softmax(self.logits / self.temperature)),
            "raw": raw,
            "unscaled": raw,
            "other_head": of(log_softmax(self.coarse / self.temperature)),
            "start_weights": of(log_softmax(self.older / self.temperature)),
            "cached": np.zeros(len(tokens), bool),
            "temperature": self.temperature,
        }
        return Readings(**{**known, **changes})


def sampled(fault: Fault | None) -> Readings:
    """Tokens of a sampler with this fault."""
    models = Models()
    logits = {Fault.HEAD_PRECISION: models.coarse, Fault.STALE_WEIGHTS: models.older}.get(fault, models.logits)
    tokens = models.draw(logits, 1.0 if fault is Fault.NO_TEMPERATURE else TEMPERATURE)
    said = log_softmax(logits / TEMPERATURE)
    if fault in (Fault.RAW_LOG_PROBS, Fault.NO_TEMPERATURE):
        said = log_softmax(logits)
    if fault is Fault.SCALED_LOG_PROBS:
        said = log_softmax(logits) / TEMPERATURE
    return models.readings(tokens, said)


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.PREFIX_CACHE])
def test_the_fault_of_the_sampler_is_named(fault: Fault) -> None:
    report = compare(sampled(fault))
    assert report.fault == fault.value
    assert report.gap.mean > 10 * AGREEMENT
    (named,) = [finding for finding in report.findings if finding.differs]
    assert named.fault == fault.value
    assert named.gap is not None
    assert named.gap.max < 1e-9


def test_a_sampler_that_agrees_has_no_fault() -> None:
    report = compare(sampled(None))
    assert (report.fault, report.num_tokens) == (None, NUM_TOKENS)
    assert report.gap.max < 1e-9


def test_the_gap_is_told_as_mean_99th_percentile_and_maximum() -> None:
    models = Models()
    readings = models.readings(models.draw(models.logits, TEMPERATURE), log_softmax(models.logits / TEMPERATURE))
    off = np.zeros(NUM_TOKENS)
    off[:2], off[2:6] = [-4.0, 2.0], 1.0
    gap = compare(Readings(**{**vars(readings), "sampler": readings.trainer + off})).gap
    assert gap.mean == pytest.approx(10 / NUM_TOKENS)
    assert gap.p99 == pytest.approx(np.quantile(np.abs(off), 0.99))
    assert gap.max == pytest.approx(4.0)


def test_noise_that_no_fault_predicts_is_reported_without_a_name() -> None:
    readings = sampled(None)
    noise = np.random.default_rng(1).normal(0, 0.3, NUM_TOKENS)
    report = compare(Readings(**{**vars(readings), "sampler": readings.trainer + noise}))
    assert report.fault is None
    assert report.gap.mean > 0.2


def test_at_temperature_one_raw_log_probabilities_are_not_told_apart() -> None:
    models = Models(temperature=1.0)
    report = compare(models.readings(models.draw(models.logits, 1.0), log_softmax(models.logits)))
    untold = {finding.fault for finding in report.findings if finding.gap is None}
    assert {"raw_log_probs", "no_temperature", "scaled_log_probs"} <= untold


def test_raw_log_probabilities_over_the_vocabulary_are_told_from_those_in_a_nucleus_without_temperature() -> None:
    models = Models()
    tokens = models.draw(models.logits, TEMPERATURE)
    readings = models.readings(tokens, log_softmax(models.logits))
    within = readings.raw + 0.1
    raw = compare(Readings(**{**vars(readings), "unscaled": within}))
    unscaled = compare(Readings(**{**vars(readings), "unscaled": within, "sampler": within}))
    assert (raw.fault, unscaled.fault) == ("raw_log_probs", "no_temperature")


def test_a_difference_of_cached_requests_alone_is_laid_to_the_prefix_cache() -> None:
    readings = sampled(None)
    cached = np.arange(NUM_TOKENS) % 2 == 1
    off = np.where(cached, np.random.default_rng(2).normal(0, 0.3, NUM_TOKENS), 0.0)
    report = compare(Readings(**{**vars(readings), "cached": cached, "sampler": readings.trainer + off}))
    assert report.fault == "prefix_cache"
    everything = compare(Readings(**{**vars(readings), "cached": np.ones(NUM_TOKENS, bool)}))
    assert next(finding for finding in everything.findings if finding.fault == "prefix_cache").gap is None


def test_weights_that_are_the_trainers_own_are_not_called_stale() -> None:
    readings = sampled(Fault.HEAD_PRECISION)
    report = compare(Readings(**{**vars(readings), "start_weights": None}))
    assert report.fault == "head_precision"
