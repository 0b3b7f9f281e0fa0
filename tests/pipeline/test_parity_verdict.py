"""What becomes of a difference between trainer and engine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipeline.parity_verdict import EngineParity, engine_parity, refuse_difference
from pipeline.probe_sequence import ProbeSequence
from vime.errors import EngineError, ParityError


def sequence(num_tokens: int = 7, response: int = 3) -> ProbeSequence:
    return ProbeSequence(list(range(num_tokens)), response, [-0.5] * response)


class Trainer:
    """Scores -0.5 for each token, plus what it is told to be off, and remembers what it was asked for."""

    def __init__(self, off: float, start_off: float = 0.0) -> None:
        self._off, self._start_off = off, start_off
        self.asked: list[bool] = []

    async def score(self, sequences: Sequence[ProbeSequence], start_weights: bool) -> dict[str, list[float]]:
        self.asked.append(start_weights)
        count = sum(each.response_length for each in sequences)
        if start_weights:
            return {"start_weights": [-0.5 + self._start_off] * count}
        values = [-0.5 + self._off] * count
        return dict.fromkeys(("trainer", "raw", "unscaled", "other_head"), values)


async def compared(trainer: Trainer, *sequences: ProbeSequence) -> EngineParity:
    return await engine_parity("Engine 0", sequences, trainer.score, temperature=1.0, threshold=0.05)


async def test_where_engine_and_trainer_agree_start_weights_are_not_tried() -> None:
    trainer = Trainer(0.0)
    found = await compared(trainer, sequence(), sequence(9, 4))
    assert trainer.asked == [False]
    assert str(found) == "Engine 0 against the trainer on 7 tokens: mean 0, p99 0, max 0."
    refuse_difference([found], 0.05)


async def test_a_difference_below_the_threshold_is_told_and_allowed() -> None:
    trainer = Trainer(0.01)
    found = await compared(trainer, sequence())
    assert trainer.asked == [False]
    assert "Engine 0 against the trainer on 3 tokens: mean 0.01" in str(found)
    refuse_difference([found], 0.05)


async def test_weights_of_the_start_are_tried_where_nothing_else_explains_a_difference() -> None:
    trainer = Trainer(0.3, start_off=0.001)
    found = await compared(trainer, sequence())
    assert trainer.asked == [False, True]
    with pytest.raises(ParityError, match="stale_weights: the sampler still has the weights") as caught:
        refuse_difference([found], 0.05)
    assert "mean 0.3" in str(caught.value)
    assert "Allowed: a mean of 0.05 (--parity-threshold)" in str(caught.value)
    assert "restart the run" in (caught.value.next_step or "")


async def test_a_difference_without_a_known_fault_stops_too() -> None:
    found = await compared(Trainer(0.3, start_off=0.3), sequence())
    with pytest.raises(ParityError) as caught:
        refuse_difference([found], 0.05)
    assert "No known fault explains it" in (caught.value.next_step or "")


async def test_an_engine_that_samples_nothing_is_refused() -> None:
    with pytest.raises(EngineError, match="Engine 0 sampled no token of any probe"):
        await compared(Trainer(0.0))
