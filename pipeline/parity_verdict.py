"""Engines against the trainer on probed sequences: do they agree, and if not, why."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np

from pipeline.probe_sequence import ProbeSequence
from vime.algorithms.parity import REMEDIES, Fault, ParityReport, Readings, compare
from vime.errors import EngineError, ParityError


class EngineParity(msgspec.Struct, frozen=True):
    """One engine against the trainer."""

    engine: str
    report: ParityReport

    def __str__(self) -> str:
        report = self.report
        named = [f"; {finding.fault}: {finding.meaning}" for finding in report.findings if finding.differs]
        return f"{self.engine} against the trainer on {report.num_tokens} tokens: {report.gap}{''.join(named)}."


Score = Callable[[Sequence[ProbeSequence], bool], Awaitable[dict[str, list[float]]]]
"""The trainer's scores of sequences by field of `Readings`; true: only those under the start weights."""


async def engine_parity(
    name: str, sequences: Sequence[ProbeSequence], score: Score, *, temperature: float, threshold: float
) -> EngineParity:
    """Compare one engine; above `threshold` and without another explanation its start weights are tried too.

    Raises `EngineError` where it sampled nothing.
    """
    if not sequences:
        raise EngineError(f"{name} sampled no token of any probe.", next_step="Look at the engine's log.")
    known = {name: np.array(values) for name, values in (await score(sequences, False)).items()}
    lengths = [sequence.response_length for sequence in sequences]
    readings = Readings(
        sampler=np.array([value for sequence in sequences for value in sequence.log_probs]),
        cached=np.repeat([sequence.cached for sequence in sequences], lengths),
        temperature=temperature,
        **known,
    )
    report = compare(readings)
    if report.fault is None and report.gap.mean > threshold:
        more = {name: np.array(values) for name, values in (await score(sequences, True)).items()}
        report = compare(Readings(**{**vars(readings), **more}))
    return EngineParity(name, report)


def refuse_difference(found: Sequence[EngineParity], threshold: float) -> None:
    """Raise `ParityError` for the engines whose mean difference is above `threshold`."""
    wrong = [each for each in found if each.report.gap.mean > threshold]
    if wrong:
        fault = next((each.report.fault for each in wrong if each.report.fault is not None), None)
        raise ParityError(
            " ".join(map(str, wrong)) + f" Allowed: a mean of {threshold:g} (--parity-threshold).",
            next_step="No known fault explains it: compare the engine's and the trainer's model settings."
            if fault is None
            else REMEDIES[Fault(fault)],
        )
