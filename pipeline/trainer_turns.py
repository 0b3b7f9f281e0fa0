"""The trainer's ranks of a session: started from the newest commit, and with --release-train ended between batches."""

from __future__ import annotations

from pipeline.commits import Commits
from pipeline.packing import PackingSettings
from pipeline.packing_settings import packing_settings
from pipeline.progress import ProgressView
from pipeline.workers import Workers
from vime.settings.groups import Settings


class TrainerTurns:
    """When the ranks' processes are there."""

    def __init__(self, settings: Settings, workers: Workers, commits: Commits, view: ProgressView) -> None:
        self._settings, self._workers, self._commits, self._view = settings, workers, commits, view
        self.packing = PackingSettings(num_ranks=1)
        """How batches are packed for the ranks, once they have started."""

    async def start(self) -> None:
        """Start the ranks with what the newest commit holds, that of this session or of the one it continues."""
        self.packing = packing_settings(self._settings, await self._workers.start_trainers())
        if self._commits.newest is None:
            await self._workers.trainers.load_start()
        else:
            directory, rollout_id = self._commits.newest
            await self._workers.trainers.load(str(directory), rollout_id)
        self._workers.trainers.watch()

    async def release(self) -> None:
        """With --release-train end the ranks' processes until there is a batch to train."""
        if self._settings.cluster.release_train:
            await self._workers.guarded(self._commits.settle())
            await self._workers.guarded(self._workers.trainers.release())
            await self._workers.record_processes()

    async def revive(self) -> None:
        """Start the ranks again where they were released."""
        if not self._workers.trainers.ranks:
            self._view.waiting("the trainer starts from what it was when it ended")
            await self._workers.guarded(self.start())
            await self._workers.record_processes()
