"""The coordinator over a queue in memory."""

from __future__ import annotations

from pathlib import Path

from pipeline.coordinator import Coordinator
from pipeline.coordinator_config import CoordinatorConfig
from pipeline.storage_care import StorageCare
from storage.disk_reserve import DiskReserve
from storage.files import make_folder
from storage.memory_parts import PartStore
from storage.memory_pool import MemoryPool
from storage.memory_queue import MemoryQueue
from storage.positions import PositionRanges
from storage.step_log import StepLog
from vime.data.prompt_stream import PromptStream


def open_memory_coordinator(
    *, run_id: str, parts: PartStore, step_log_folder: Path, source: PromptStream, config: CoordinatorConfig
) -> Coordinator:
    """A coordinator whose groups live in `parts`; what the commit that `config` names had left unfinished waits again.

    Raises:
        StorageError: the step log can't be opened, or the commit doesn't cover all groups before its cursor.
    """
    make_folder(step_log_folder)
    pool = MemoryPool(run_id, parts)
    queue = MemoryQueue(pool, StepLog(step_log_folder), lease_seconds=config.lease_seconds)
    try:
        if config.memory is not None:
            unfinished = [
                task
                for first, last in config.memory.unfinished
                for task in source.take(source.cursor_at(first), last - first + 1)[0]
            ]
            cursor = source.cursor_at(config.next_group_index)
            queue.restore(config.memory, PositionRanges(config.trained), unfinished, cursor)
        storage = StorageCare(DiskReserve(step_log_folder, config.reserve_bytes), None)
        return Coordinator(pool, queue, source, config, storage)
    except BaseException:
        queue.close()
        raise
