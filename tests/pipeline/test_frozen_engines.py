"""Engines of models that aren't trained are fenced and readmitted by their own router."""

from __future__ import annotations

from collections.abc import Collection

from pipeline.frozen_engines import FencesOfModels, FrozenEngines


class Trained:
    moment: int | None = 7

    def __init__(self) -> None:
        self.said: list[str] = []

    async def fence(self, address: str, reason: str) -> None:
        self.said.append(f"fence {address}: {reason}")

    async def readmit(self, address: str) -> None:
        self.said.append(f"readmit {address}")


async def test_a_frozen_engine_serves_as_soon_as_it_runs_again_and_a_trained_one_waits_for_weights() -> None:
    served: list[list[str]] = []

    async def serve_only(addresses: Collection[str]) -> None:
        served.append(sorted(addresses))

    trained = Trained()
    frozen = FrozenEngines(["r1", "r2"], serve_only)
    fences = FencesOfModels(trained, {"r1": frozen, "r2": frozen})
    await fences.fence("r1", "died")
    await fences.readmit("r1")
    await fences.fence("a", "died")
    await fences.readmit("a")
    assert served == [["r2"], ["r1", "r2"]]
    assert trained.said == ["fence a: died", "readmit a"]
    assert fences.moment == 7
