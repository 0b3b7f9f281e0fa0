"""Signals: the first one finishes the step, the second one stops at once; both end as interrupted."""

import asyncio
import contextlib
import os
import signal

import pytest

from pipeline.interrupt import Ending, Interrupts
from pipeline.progress import ProgressView


async def sleeps(interrupts: Interrupts, signals: int) -> Ending:
    with interrupts.finishing_steps():
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)
        if interrupts.stop_asked and signals == 1:
            return Ending.INTERRUPTED
        await asyncio.sleep(60 if signals else 0)
    return Ending.DONE


@pytest.mark.parametrize(
    ("signals", "ending"), [(0, Ending.DONE), (1, Ending.INTERRUPTED), (2, Ending.INTERRUPTED)]
)  # fmt: skip
def test_how_a_session_ends(signals: int, ending: Ending, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressView() as view, Interrupts(view) as interrupts:
        assert interrupts.run(sleeps(interrupts, signals)) is ending
    out = capsys.readouterr().out
    assert ("Finishing the step" in out) is (signals > 0)
    assert ("Stopped at once" in out) is (signals > 1)


def test_a_signal_before_the_session_that_other_code_swallows_keeps_it_from_beginning() -> None:
    before = signal.getsignal(signal.SIGINT)
    with ProgressView() as view, Interrupts(view) as interrupts:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(interrupted_and_done())
        assert interrupts.run(sleeps(interrupts, 0)) is Ending.INTERRUPTED
    assert signal.getsignal(signal.SIGINT) is before


async def interrupted_and_done() -> None:
    with contextlib.suppress(asyncio.CancelledError):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
