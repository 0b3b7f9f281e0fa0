"""The trainer's ranks as one: started, released and ended together, and called together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from pipeline.actors.settings import encode_settings
from pipeline.actors.trainer import TrainerActor
from pipeline.cluster import Cluster, answer, closed
from pipeline.messages import decode
from pipeline.process_watch import ProcessWatch
from pipeline.weight_transports.disk import PublishedVersion
from vime.errors import ProcessDiedError, TrainerDiedError
from vime.settings.groups import Settings

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0


class TrainerGroup:
    """Handles of all ranks. A call to a rank whose process died raises `TrainerDiedError`."""

    def __init__(
        self,
        settings: Settings,
        cluster: Cluster,
        watch: ProcessWatch,
        leave_lost_nodes: Callable[[], Awaitable[None]],
    ) -> None:
        """`leave_lost_nodes` gives ranks whose node is lost a place on another one; raises `RunFailedError`."""
        self._settings, self._cluster, self._watch = settings, cluster, watch
        self._leave_lost_nodes = leave_lost_nodes
        self._encoded, self._patience_s = encode_settings(settings), settings.queue.stall_timeout
        self.ranks = self._spawn()
        self._following: asyncio.Future[list[None]] | None = None
        """Ranks above 0 that gather with rank 0 while it shares weights."""

    async def start(self, coordinator: Any) -> int:
        """Build the ranks' models, in new processes where there are none; the data-parallel size.

        Those whose node is lost start on another one.

        Raises:
            RunFailedError: none has room.
            StalledError: a rank took longer than --stall-timeout.
        """
        if not self.ranks:
            await self._leave_lost_nodes()
            self.ranks = self._spawn()
        init_method = await self._on_first(
            lambda trainer: trainer.rendezvous.remote(), "find an address for the ranks", self._patience_s
        )
        sizes: list[int] = await self.on_all(
            lambda trainer: trainer.build.remote(init_method, len(self.ranks), coordinator),
            "build its model",
            self._patience_s,
        )
        return sizes[0]

    async def load_start(self) -> None:
        """Load the weights that a run begins with. Raises `StalledError` after --stall-timeout."""
        await self.on_all(lambda trainer: trainer.load_start.remote(), "load the first weights", self._patience_s)

    async def load(self, directory: str, rollout_id: int) -> None:
        """Load a checkpoint. Raises `StalledError` after --stall-timeout."""
        await self.on_all(
            lambda trainer: trainer.load.remote(directory, rollout_id),
            f"load the checkpoint of rollout {rollout_id} in {directory}",
            self._patience_s,
        )

    async def load_hf(self) -> None:
        """Load --hf-checkpoint. Raises `StalledError` after --stall-timeout."""
        await self.on_all(lambda trainer: trainer.load_hf.remote(), "load --hf-checkpoint", self._patience_s)

    async def rest(self) -> None:
        """Leave the devices' memory until there is work again. Raises `StalledError` after --stall-timeout."""
        await self.on_all(lambda trainer: trainer.rest.remote(), "leave its device's memory", self._patience_s)

    async def probe(self, sequences: bytes, start_weights: bool) -> list[bytes]:
        """The ranks' scores of a few sequences. Raises `StalledError` after --stall-timeout."""
        return await self.on_all(
            lambda trainer: trainer.probe.remote(sequences, start_weights), "score the probes", self._patience_s
        )

    def watch(self) -> None:
        """From now on a rank that dies is missed."""
        for rank, trainer in enumerate(self.ranks):
            self._watch.add(f"trainer_{rank}", trainer.watch.remote(), TrainerDiedError)

    async def release(self) -> None:
        """End the ranks' processes, and with them all that they hold; nobody misses them until the next start."""
        ending = self._watch.forget("trainer_")
        closing = [
            asyncio.create_task(closed(trainer.close.remote(), f"trainer rank {rank}"))
            for rank, trainer in enumerate(self.ranks)
        ]
        await asyncio.wait(closing, timeout=STOP_TIMEOUT_S)
        await self._end(ending)

    async def abandon(self) -> None:
        """End what is left of the ranks when one has died: the others may wait for it for ever."""
        self._following = None
        await self._end(self._watch.forget("trainer_"))

    async def on_all(
        self, call: Callable[[Any], Awaitable[Any]], doing: str = "answer", within_s: float | None = None
    ) -> list[Any]:
        """The same call on every rank, at once; without a limit where a supervisor watches that the ranks get on."""
        ranks = range(len(self.ranks))
        return list(await asyncio.gather(*(self._on(rank, call, doing, within_s) for rank in ranks)))

    # The trainer's side of a publication.

    async def hold_weights(self) -> bool:
        """Copy the weights where there is room, so that the calls below publish these while the ranks train."""
        if not await self._on_first(lambda trainer: trainer.can_hold_weights.remote()):
            return False
        if all(await self.on_all(lambda trainer: trainer.hold_weights.remote())):
            return True
        await self.let_go_weights()
        return False

    async def let_go_weights(self) -> None:
        """The calls below publish the ranks' present weights again."""
        await self.on_all(lambda trainer: trainer.let_go_weights.remote())

    async def open_sender(self, engine_names: list[str], timeout_s: float) -> list[dict[str, object]]:
        joining: list[dict[str, object]] = await self._on_first(
            lambda trainer: trainer.open_sender.remote(engine_names, timeout_s)
        )
        return joining

    async def connect_sender(self) -> None:
        await self._on_first(lambda trainer: trainer.connect_sender.remote())

    async def send_weights(self) -> int:
        sent: list[int] = await self.on_all(lambda trainer: trainer.send_weights.remote())
        return sent[0]

    async def highest_version_on_disk(self) -> int:
        version: int = await self._on_first(
            lambda trainer: trainer.highest_version_on_disk.remote(), "look for versions on disk", self._patience_s
        )
        return version

    async def write_version(self, version: int, *, full: bool) -> PublishedVersion:
        told = await self.on_all(lambda trainer: trainer.write_version.remote(version, full))
        return decode(told[0], PublishedVersion)

    async def run_post_write_hook(self, folder: str, engine_names: list[str]) -> None:
        await self.on_all(lambda trainer: trainer.run_post_write_hook.remote(folder, engine_names))

    async def remove_version(self, version: int) -> None:
        await self._on_first(lambda trainer: trainer.remove_version.remote(version))

    async def share_next_part(self, version: int) -> dict[str, object] | None:
        if self._following is None:
            self._following = asyncio.gather(
                *(self._on(rank, lambda trainer: trainer.follow_sharing.remote()) for rank in range(1, len(self.ranks)))
            )
        part: dict[str, object] | None = await self._on_first(lambda trainer: trainer.share_next_part.remote(version))
        if part is None:
            await self._stop_following()
        return part

    async def stop_sharing(self) -> None:
        await self._on_first(lambda trainer: trainer.stop_sharing.remote())
        await self._stop_following()

    async def _stop_following(self) -> None:
        following, self._following = self._following, None
        if following is not None:
            await following

    async def _on_first(
        self, call: Callable[[Any], Awaitable[Any]], doing: str = "answer", within_s: float | None = None
    ) -> Any:
        return await self._on(0, call, doing, within_s)

    async def _on(
        self, rank: int, call: Callable[[Any], Awaitable[Any]], doing: str = "answer", within_s: float | None = None
    ) -> Any:
        try:
            return await answer(call(self.ranks[rank]), f"trainer rank {rank}", within_s=within_s, doing=doing)
        except ProcessDiedError as error:
            raise TrainerDiedError(error.message, next_step=error.next_step) from error

    async def _end(self, watchers: list[asyncio.Task[Any]]) -> None:
        for trainer in self.ranks:
            self._cluster.end(trainer)
        self.ranks = []
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.gather(*watchers, return_exceptions=True)
        except TimeoutError:
            logger.warning("trainer ranks have not ended %.0f s after they were told to", STOP_TIMEOUT_S)

    def _spawn(self) -> list[Any]:
        environment = {name: str(value) for name, value in self._settings.trainer.train_env_vars.items()}
        return [
            self._cluster.spawn_worker(TrainerActor, rank, self._encoded, rank, env=environment)
            for rank in range(self._settings.cluster.num_trainer_ranks)
        ]
