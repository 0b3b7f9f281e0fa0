"""A trainer rank's process."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from pipeline.actors.settings import decode_settings
from pipeline.messages import TrainReport, decode, encode
from pipeline.planner import BatchPlan
from pipeline.pool_wiring import open_bounded_pool
from pipeline.probe_sequence import ProbeSequence
from pipeline.process_log import log_to_file
from pipeline.prometheus.exporter import start_exporter
from pipeline.prometheus.records import trainer_numbers
from pipeline.run_folder import RunFolder
from pipeline.stall_chain import RankActivity
from pipeline.trainer_wiring import build_trainer_worker

if TYPE_CHECKING:
    from pipeline.trainer_worker import TrainerWorker

_Result = TypeVar("_Result")


class Doing:
    """What a thread works on now, for others to read; empty between two calls."""

    def __init__(self) -> None:
        self.what, self._since = "", time.monotonic()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._since

    @contextmanager
    def at(self, what: str) -> Iterator[None]:
        self.what, self._since = what, time.monotonic()
        try:
            yield
        finally:
            self.what, self._since = "", time.monotonic()


class TrainerActor:
    """One trainer rank's process. The model lives on one thread; control calls don't wait for it."""

    def __init__(self, settings: bytes, rank: int) -> None:
        self._settings, self._rank = decode_settings(settings), rank
        self._folder = RunFolder.of(self._settings)
        log_to_file(self._folder.log(f"trainer_{rank}"))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._publishing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publication")
        # Torch and Megatron load while the coordinator and the engines start; only the model's thread imports them.
        self._thread.submit(importlib.import_module, "vime.backends.megatron_utils.trainer")
        self._built: TrainerWorker | None = None
        self._report: TrainReport | None = None
        self._exporter, _ = start_exporter(
            self._settings.logging, self._folder, "trainer", lambda: trainer_numbers(self._report), rank
        )
        self._training, self._publication = Doing(), Doing()

    async def pid(self) -> int:
        return os.getpid()

    async def watch(self) -> None:
        """Never returns; its caller learns when the process dies."""
        await asyncio.Event().wait()

    async def activity(self) -> bytes:
        """A `RankActivity`; answers while the model works, too."""
        num_steps = 0 if self._built is None else self._built.num_steps
        model, beside = self._training, self._publication
        return encode(RankActivity(model.what, model.age_s, num_steps, beside.what, beside.age_s))

    async def rendezvous(self) -> str:
        """An address at which the ranks can meet (asked of rank 0)."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    async def build(self, init_method: str, world_size: int, coordinator: Any) -> int:
        """Join the other ranks and build model and optimizer; the data-parallel size."""

        def build() -> int:
            pool = open_bounded_pool(self._settings, coordinator)
            self._built = build_trainer_worker(self._settings, self._folder, pool, self._rank, world_size, init_method)
            return self._built.data_parallel_size

        return await self._on_thread(build, "builds its model")

    async def load_hf(self) -> None:
        """See `TrainerWorker.load_hf`."""
        await self._on_thread(lambda: self._worker.load_hf())

    async def load_start(self) -> None:
        await self._on_thread(lambda: self._worker.load_start(), "loads the first weights")

    async def load(self, directory: str, rollout_id: int) -> None:
        await self._on_thread(lambda: self._worker.load(Path(directory), rollout_id), "loads a checkpoint")

    async def save(self, directory: str, rollout_id: int) -> None:
        await self._on_thread(lambda: self._worker.save(Path(directory), rollout_id), "saves a checkpoint")

    async def begin_save(self, directory: str, rollout_id: int) -> None:
        await self._on_thread(lambda: self._worker.begin_save(Path(directory), rollout_id))

    async def save_written(self) -> None:
        await asyncio.to_thread(self._worker.save_written)

    async def finish_save(self) -> None:
        await self._on_thread(lambda: self._worker.finish_save())

    async def save_hf(self, directory: str) -> None:
        await self._on_thread(lambda: self._worker.save_hf(Path(directory)), "exports weights")

    async def train(self, plan: bytes) -> bytes:
        self._report = await self._on_thread(lambda: self._worker.train(decode(plan, BatchPlan)), "trains")
        return encode(self._report)

    async def probe(self, sequences: bytes, start_weights: bool) -> bytes:
        """See `TrainerWorker.probe`."""
        decoded = decode(sequences, list[ProbeSequence])
        return encode(await self._on_thread(lambda: self._worker.probe(decoded, start_weights=start_weights)))

    async def rest(self) -> None:
        await self._on_thread(lambda: self._worker.rest())

    async def can_hold_weights(self) -> bool:
        return await self._on_thread(lambda: self._worker.weights.can_hold())

    async def hold_weights(self) -> bool:
        """What the calls below publish until `let_go_weights`, which then don't wait for the model's thread.

        False when there was no memory for it.
        """
        return await self._on_thread(lambda: self._worker.weights.hold(), "copies weights")

    async def let_go_weights(self) -> None:
        await self._on_publication(lambda: self._worker.weights.let_go())

    async def open_sender(self, engine_names: list[str], timeout_s: float) -> list[dict[str, object]]:
        address = ray.util.get_node_ip_address()
        return await self._on_publication(lambda: self._worker.weights.open_sender(address, engine_names, timeout_s))

    async def connect_sender(self) -> None:
        await self._on_publication(lambda: self._worker.weights.connect_sender(), "waits for engines to join")

    async def send_weights(self) -> int:
        return await self._on_publication(lambda: self._worker.weights.send(), "sends weights")

    async def highest_version_on_disk(self) -> int:
        return await self._on_publication(lambda: self._worker.weights.highest_version())

    async def write_version(self, version: int, full: bool) -> bytes:
        return encode(
            await self._on_publication(
                lambda: self._worker.weights.write_version(version, full=full), "writes weights to disk"
            )
        )

    async def run_post_write_hook(self, folder: str, engine_names: list[str]) -> None:
        await self._on_publication(
            lambda: self._worker.weights.run_post_write_hook(folder, engine_names),
            "runs --custom-update-weight-post-write-path",
        )

    async def remove_version(self, version: int) -> None:
        await self._on_publication(lambda: self._worker.weights.remove_version(version))

    async def share_next_part(self, version: int) -> dict[str, object] | None:
        return await self._on_publication(lambda: self._worker.weights.share_next_part(version), "shares weights")

    async def follow_sharing(self) -> None:
        await self._on_publication(lambda: self._worker.weights.follow_sharing())

    async def stop_sharing(self) -> None:
        await self._on_publication(lambda: self._worker.weights.stop_sharing())

    async def close(self) -> None:
        """Also of a rank that was not built, because the start failed before."""
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close)
        if self._built is not None:
            await self._on_thread(self._built.close)
        self._thread.shutdown()
        self._publishing.shutdown()

    @property
    def _worker(self) -> TrainerWorker:
        if self._built is None:
            raise RuntimeError("build() has not been called")
        return self._built

    async def _on_publication(self, work: Callable[[], _Result], doing: str = "works on a call") -> _Result:
        """Work of a publication: beside the model's thread where the weights are held."""
        held = self._worker.weights.held
        if not held.is_held:
            return await self._on_thread(work, doing)

        def beside_training() -> _Result:
            with self._publication.at(doing), held.beside_training():
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._publishing, beside_training)

    async def _on_thread(self, work: Callable[[], _Result], doing: str = "works on a call") -> _Result:
        """Work on the model's thread; `doing` is what others are told meanwhile."""

        def noted() -> _Result:
            with self._training.at(doing):
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, noted)
