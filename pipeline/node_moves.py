"""Processes that have lost their node go to another one, which has to see the queue's folder as all do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.cluster import Cluster
from pipeline.storage_proof import prove_nodes
from vime.settings.groups import QueueSettings


class NodeMoves:
    """A process that has gone to a node starts there only once the node is known to see the folder."""

    def __init__(
        self, cluster: Cluster, queue_folder: Path, settings: QueueSettings, note: Callable[[str], None]
    ) -> None:
        """`note` is told who goes where."""
        self._cluster, self._queue_folder, self._settings, self._note = cluster, queue_folder, settings, note
        self._unproven: set[int | None] = set()
        """Engines, None for the trainer, that have gone to a node of which it isn't known."""

    async def leave_lost_nodes(self, engine: int | None = None) -> None:
        """Give the trainer's ranks, or an engine, that have lost their node a place on another one.

        Raises:
            RunFailedError: none has room.
            StorageError: it doesn't see the folder; it is asked again by the next call.
        """
        moved = await self._cluster.leave_lost_nodes(engine)
        if moved:
            self._note(moved)
            self._unproven.add(engine)
        if engine in self._unproven:
            await prove_nodes(self._queue_folder, self._settings)
            self._unproven.remove(engine)
