"""From settings to the pool of a run, as each process opens it."""

from __future__ import annotations

from typing import Any

from pipeline.run_folder import RunFolder
from pipeline.storage_declaration import read_declaration
from pipeline.transports.carriers import carrier_of
from pipeline.transports.ray_parts import RayParts
from storage.bounded_pool import BoundedPool
from storage.contracts import PayloadPool
from storage.memory_pool import MemoryPool
from storage.pool import Pool
from vime.settings.groups import Settings


def create_or_open_pool(settings: Settings) -> Pool:
    """The run's pool, made when it doesn't exist; for the coordinator, which comes first."""
    root, queue = RunFolder.of(settings).queue, settings.queue
    if (root / "vime" / "pool.json").exists():
        return open_pool_on_disk(settings)
    return Pool.create(
        root,
        queue.rollout_queue_run_id,
        profile="juicefs" if queue.rollout_storage_profile == "juicefs" else "local",
        declaration=read_declaration(queue.rollout_storage_declaration),
        segment_bytes=_segment_bytes(settings),
    )


def open_pool(settings: Settings, coordinator: Any) -> PayloadPool:
    """The run's pool, made by the coordinator before; `coordinator` is the handle of its actor."""
    queue = settings.queue
    if queue.is_in_memory:
        carrier = carrier_of(queue.rollout_data_transport)
        return MemoryPool(queue.rollout_queue_run_id, RayParts(coordinator, carrier))
    return open_pool_on_disk(settings)


def open_bounded_pool(settings: Settings, coordinator: Any) -> PayloadPool:
    """The run's pool as producers and trainer ranks use it: so many threads at once as the settings say."""
    return BoundedPool(open_pool(settings, coordinator), settings.queue.rollout_io_concurrency)


def open_pool_on_disk(settings: Settings) -> Pool:
    """The run's pool, where it is on disk."""
    root, run_id = RunFolder.of(settings).queue, settings.queue.rollout_queue_run_id
    return Pool.open(root, run_id, segment_bytes=_segment_bytes(settings))


def _segment_bytes(settings: Settings) -> int | None:
    mib = settings.queue.rollout_queue_segment_mib
    return None if mib is None else mib * 2**20
