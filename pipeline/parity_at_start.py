"""The comparison of engines and trainer at the start of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.memory_turns import MemoryTurns
from pipeline.parity_verdict import engine_parity, refuse_difference
from pipeline.publication import Publication
from pipeline.workers import Workers
from vime.settings.groups import Settings


async def check_parity(
    settings: Settings,
    workers: Workers,
    turns: MemoryTurns,
    addresses: Sequence[str],
    published: Publication,
    note: Callable[[str], None],
) -> None:
    """Compare each engine but the fenced with the trainer on a few sequences; `note` is told. Raises `ParityError`."""
    engine, rollout = settings.engine, settings.rollout
    if not engine.parity_probes:
        return
    found = []
    serving = {number: address for number, address in enumerate(addresses) if address not in published.fenced}
    probed = await workers.probe_engines(list(serving.values()))
    async with turns.lent_to_trainer(published.version, serving.values()):
        for number, sequences in zip(serving, probed, strict=True):
            compared = await engine_parity(
                f"Engine {number}",
                sequences,
                workers.score_probe,
                temperature=rollout.rollout_temperature,
                threshold=engine.parity_threshold,
            )
            note(str(compared))
            found.append(compared)
    refuse_difference(found, engine.parity_threshold)
