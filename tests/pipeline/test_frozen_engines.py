"""Engines of models that aren't trained are fenced and readmitted by their own router."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pipeline.frozen_engines import FencesOfModels, FrozenEngines


class Trained:
    moment: int | None = 7

    def __init__(self) -> None:
        self.said: list[str] = []

    async def fence(self, address: str, reason: str) -> None:
        self.said.append(f"fence {address}: {reason}")

    async def give_up(self, address: str) -> None:
        self.said.append(f"give up {address}")

    async def readmit(self, address: str, now_at: str) -> None:
        self.said.append(f"readmit {address} at {now_at}")


async def test_a_frozen_engine_serves_as_soon_as_it_runs_again_and_a_trained_one_waits_for_weights() -> None:
    served: list[list[str]] = []

    async def serve_only(addresses: Collection[str]) -> None:
        served.append(sorted(addresses))

    trained = Trained()
    frozen = FrozenEngines(["r1", "r2"], serve_only, ignored, unheard)
    fences = FencesOfModels(trained, {"r1": frozen, "r2": frozen}, nobody_moves)
    await fences.fence("r1", "died")
    await fences.readmit("r1", "r1")
    await fences.fence("a", "died")
    await fences.readmit("a", "a")
    await fences.give_up("a")
    await fences.give_up("r2")
    assert served == [["r2"], ["r1", "r2"]]
    assert trained.said == ["fence a: died", "readmit a at a", "give up a"]
    assert fences.moment == 7


async def test_a_frozen_engine_gets_requests_when_whoever_wakes_it_knows_where_it_is() -> None:
    said: list[str] = []

    async def serve_only(addresses: Collection[str]) -> None:
        said.append(f"serve {sorted(addresses)}")

    async def runs_anew(address: str, now_at: str) -> None:
        said.append(f"{address} at {now_at}")

    frozen = FrozenEngines(["r1"], serve_only, runs_anew, lambda fenced: said.append(f"fenced {dict(fenced)}"))
    await frozen.fence("r1", "died")
    await frozen.readmit("r1", "n1")
    assert said == ["fenced {'r1': 'died'}", "serve []", "r1 at n1", "serve ['n1']", "fenced {}"]


def unheard(fenced: Mapping[str, str]) -> None:
    del fenced


async def ignored(address: str, now_at: str) -> None:
    del address, now_at


async def nobody_moves(address: str, now_at: str) -> None:
    raise AssertionError(f"{address} has not moved to {now_at}")


async def test_engines_that_went_to_another_node_are_fenced_there_from_then_on() -> None:
    served: list[list[str]] = []
    moves: list[tuple[str, str]] = []

    async def serve_only(addresses: Collection[str]) -> None:
        served.append(sorted(addresses))

    async def on_move(address: str, now_at: str) -> None:
        moves.append((address, now_at))

    trained = Trained()
    fences = FencesOfModels(trained, {"r1": FrozenEngines(["r1"], serve_only, ignored, unheard)}, on_move)
    await fences.fence("r1", "lost its node")
    await fences.readmit("r1", "n1")
    await fences.fence("n1", "died")
    await fences.fence("a", "lost its node")
    await fences.readmit("a", "b")
    assert served == [[], ["n1"], []]
    assert trained.said == ["fence a: lost its node", "readmit a at b"]
    assert moves == [("r1", "n1"), ("a", "b")]
