"""Engines and trainer ranks of a job, started only to be compared: no queue, no producer, no run folder."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.cluster import Cluster
from pipeline.job_supervision import supervise_ranks
from pipeline.memory_turns import MemoryTurns
from pipeline.parity_probe import probe_engines
from pipeline.parity_verdict import EngineParity, engine_parity
from pipeline.probe_sequence import ProbeSequence
from pipeline.publisher import WeightPublisher
from pipeline.run_folder import RunFolder
from pipeline.stages import Stage
from pipeline.weight_wiring import weight_transport
from pipeline.workers import Workers
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import PublicationError
from vime.settings.groups import Settings
from vime.settings.rules.quantities import demand_of


def measure_parity(settings: Settings, folder: Path, report: Callable[[str], None]) -> list[EngineParity]:
    """Start the job's engines and trainer ranks, publish the weights of --hf-checkpoint, and compare each engine.

    Logs go to `folder`, which takes the place of --save. `report` is told what is waited for. Raises `VimeError` for
    what doesn't start.
    """
    alone = _alone(settings, folder)
    RunFolder.of(alone).make()
    with Cluster(demand_of(alone), 0) as cluster:
        return asyncio.run(_measure(alone, Workers(alone, RunFolder.of(alone), cluster), report))


def _alone(settings: Settings, folder: Path) -> Settings:
    """The same job with a folder of its own, a queue that is never opened, and no versions of weights on disk.

    No engine outlives it.
    """
    return dataclasses.replace(
        settings,
        checkpoint=dataclasses.replace(settings.checkpoint, save=str(folder), load=None),
        queue=dataclasses.replace(
            settings.queue, rollout_data_transport="object-store", rollout_data_dir=None, rollout_session_id=None
        ),
        weights=dataclasses.replace(
            settings.weights, update_weight_transport="nccl", update_weight_mode="full", update_weight_disk_dir=None
        ),
    )


async def _measure(settings: Settings, workers: Workers, report: Callable[[str], None]) -> list[EngineParity]:
    clients: list[EngineClient] = []
    try:
        turns = MemoryTurns(settings.cluster, workers)
        addresses = await turns.start_both(lambda: workers.engines.start(report), lambda: _start_trainers(workers))
        workers.trainers.watch()
        stages = supervise_ranks(settings.queue, workers, report, RunFolder.of(settings).stalls)
        stages.begin(Stage("the weights are published"))
        clients.extend(turns.engine(address) for address in addresses)
        await turns.give_to_trainer()
        publisher = WeightPublisher(
            clients,
            weight_transport(settings, workers.trainers),
            workers,
            start_version=0,
            flush_interval=settings.weights.flush_cache_interval,
            timeout_s=settings.weights.update_weight_timeout,
        )
        published = await workers.guarded(publisher.publish())
        if published.fenced:
            raise PublicationError(
                f"Not every engine holds the trainer's weights: {'; '.join(published.fenced.values())}",
                next_step=f"Look at the engines' logs in {RunFolder.of(settings).logs}.",
                engines=published.fenced,
            )
        stages.begin(Stage("engines and trainer are compared"))
        probed = await workers.guarded(probe_engines(settings, addresses))
        async with turns.lent_to_trainer(published.version, addresses):
            return await workers.guarded(_compare(settings, workers, probed))
    finally:
        for client in clients:
            await client.close()
        await workers.stop()


async def _start_trainers(workers: Workers) -> None:
    await workers.start_trainers()
    await workers.trainers.load_hf()


async def _compare(
    settings: Settings, workers: Workers, probed: Sequence[Sequence[ProbeSequence]]
) -> list[EngineParity]:
    return [
        await engine_parity(
            f"Engine {number}",
            sequences,
            workers.score_probe,
            temperature=settings.rollout.rollout_temperature,
            threshold=settings.engine.parity_threshold,
        )
        for number, sequences in enumerate(probed)
    ]
