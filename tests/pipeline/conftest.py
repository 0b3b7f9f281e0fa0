"""What the tests of producers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipeline import producer, rollout_runner
from tests.support.standin_engine import StandinEngine


@pytest.fixture
def engine() -> Iterator[StandinEngine]:
    """A stand-in engine that serves policy version 1."""
    with StandinEngine() as standin:
        standin.version = "1"
        yield standin


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed group goes back to the queue at once."""
    monkeypatch.setattr(producer, "RETRY_S", 0.01)
    monkeypatch.setattr(rollout_runner, "RETRY_S", 0.01)
