"""The commits of one session: written while training waits or, with --async-save, while it goes on."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.run_folder import RunFolder
from pipeline.session_start import Start
from pipeline.token_log import remove_token_logs
from pipeline.workers import Workers
from recovery.checkpoint_retention import Keeping, remove_commits
from recovery.commit import QueueState, iteration_directory, write_commit
from recovery.pointer import point_to
from recovery.retention import last_releasable_rollout, releasable
from storage.files import make_folder
from storage.positions import PositionRanges
from vime.errors import StorageError
from vime.settings.groups import Settings


class Commits:
    """Makes commits one after the other; a later one waits until the one before it is on disk."""

    def __init__(
        self, settings: Settings, folder: RunFolder, start: Start, workers: Workers, note: Callable[[str], None]
    ) -> None:
        """`note` is told of each commit when it is on disk, and of each that is being written."""
        self._settings, self._folder, self._workers, self._note = settings, folder, workers, note
        self._directory = folder.root / start.plan.directory
        self.newest: tuple[Path, int] | None = None
        """Folder and rollout of the newest commit on disk, that of this session or of the one it continues."""
        if start.plan.commit_directory is not None and start.plan.commit_rollout is not None:
            self.newest = (folder.root / start.plan.commit_directory, start.plan.commit_rollout)
        self.trainers_busy = asyncio.Lock()
        """Held while the ranks work together: a commit in the background then waits with its own calls to them."""
        self._writing: asyncio.Task[None] | None = None
        self._recording: asyncio.Task[Path] | None = None

    async def commit(self, start: Start, rollout_id: int, weight_version: int) -> None:
        """Model, optimizer and RNG of all ranks, then the queue state, then the record that makes them one.

        With --async-save this returns when the ranks have copied what they are to write, and the rest follows in the
        background. Nothing is written before the first batch.
        """
        if rollout_id < 0:
            return
        await self.settle()
        started = time.monotonic()
        shutil.rmtree(iteration_directory(self._directory, rollout_id), ignore_errors=True)
        make_folder(self._directory / "rollout")
        directory, in_background = str(self._directory), self._settings.checkpoint.async_save
        if in_background:
            await self._workers.on_trainers(lambda trainer: trainer.begin_save.remote(directory, rollout_id))
        else:
            await self._workers.on_trainers(lambda trainer: trainer.save.remote(directory, rollout_id))
        await self._workers.queue.save_prompt_source(rollout_id)
        state = await self._workers.queue.state()
        if in_background:
            self._note(
                f"Copied rollout {rollout_id} in {time.monotonic() - started:.1f} s; it is being written, and no "
                "commit before that is said here."
            )
        else:
            await self._seal(start, rollout_id, weight_version, state, started)
        await self._export(rollout_id)
        if in_background:
            self._writing = asyncio.create_task(
                self._seal_when_written(start, rollout_id, weight_version, state, started)
            )

    async def settle(self) -> None:
        """Wait until the commit that is being written is on disk; raises what it failed with."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    def check(self) -> None:
        """Raise what the commit that is being written has failed with."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def abandon(self) -> None:
        """Give up the commit that is being written: it never becomes one, unless its record is being written now.

        Then that is waited for, and `newest` tells of it: nobody may go back to an older one beside it.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        if self._recording is not None:
            await asyncio.gather(self._recording, return_exceptions=True)

    async def _seal_when_written(
        self, start: Start, rollout_id: int, weight_version: int, state: QueueState, started: float
    ) -> None:
        await self._workers.on_trainers(lambda trainer: trainer.save_written.remote())
        async with self.trainers_busy:
            await self._workers.on_trainers(lambda trainer: trainer.finish_save.remote())
        await self._seal(start, rollout_id, weight_version, state, started)

    async def _seal(
        self, start: Start, rollout_id: int, weight_version: int, state: QueueState, started: float
    ) -> None:
        """Write the record of a checkpoint that is complete, then let go of what no commit needs any more."""
        queue = self._settings.queue
        self._recording = asyncio.create_task(self._record(start, rollout_id, weight_version, state))
        path = await asyncio.shield(self._recording)
        for root in {self._folder.root / self._folder.output, self._directory}:
            await asyncio.to_thread(point_to, root, start.plan.directory, rollout_id)
        checkpoint = self._settings.checkpoint
        keeping = Keeping(checkpoint.keep_checkpoints, checkpoint.keep_every)
        for record in await asyncio.to_thread(remove_commits, self._folder.root, keeping, self._folder.output):
            self._note(f"Removed the checkpoint of {_relative(record)}.")
        released = PositionRanges()
        if queue.rollout_queue_online_gc:
            kept = (self._folder.root, start.plan.directory, queue.rollout_queue_keep_commits)
            released = releasable(*kept)
            await self._remove_token_logs(last_releasable_rollout(*kept))
        await self._workers.queue.rotate(state, released)
        how = ", written in the background" if self._settings.checkpoint.async_save else ""
        self._note(f"Committed rollout {rollout_id} in {time.monotonic() - started:.1f} s{how}: {_relative(path)}")

    async def _remove_token_logs(self, last_rollout: int | None) -> None:
        try:
            await asyncio.to_thread(remove_token_logs, self._folder.token_log, last_rollout)
        except StorageError as error:
            self._note(f"warning: old token logs stay: {error}")

    async def _record(self, start: Start, rollout_id: int, weight_version: int, state: QueueState) -> Path:
        """Write the record; its path."""
        path = await asyncio.to_thread(
            write_commit,
            self._directory,
            rollout_id=rollout_id,
            branch=start.branch,
            parent=start.parent,
            weight_version=weight_version,
            run_id=self._settings.queue.rollout_queue_run_id,
            rollout_data_dir=str(self._folder.queue.parent),
            queue_state=state,
        )
        self.newest = (self._directory, rollout_id)
        return path

    async def _export(self, rollout_id: int) -> None:
        """The weights that were committed, for other programs."""
        template = self._settings.checkpoint.save_hf
        if template is None:
            return
        started = time.monotonic()
        target = Path(template.format(rollout_id=rollout_id)).absolute()
        await self._workers.on_trainers(lambda trainer: trainer.save_hf.remote(str(target)))
        self._note(f"Exported to {_relative(target)} in {time.monotonic() - started:.1f} s.")


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
