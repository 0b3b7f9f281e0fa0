"""Publications of a real model's weights into a loaded engine: its pause, the tokens that it costs, and deltas."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engines import engine_launch, model_in, ready_engine
from benchmarks.gpu.jobs import ONE_GPU_SHARE
from benchmarks.gpu.part import Part, Stages, run_part
from benchmarks.gpu.plain_copy import plain_seconds
from benchmarks.gpu.traffic import Traffic, Window
from benchmarks.publish import Admission, Source
from pipeline.publication import Publication
from pipeline.publisher import WeightPublisher
from pipeline.trainer_weights import PublishSettings, TrainerWeights
from pipeline.weight_transports.disk import DiskSettings, DiskTransport, PublishedVersion
from pipeline.weight_transports.group import GroupTransport
from pipeline.weight_transports.shared import SharedTransport
from pipeline.weight_transports.transport import WeightTransport
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.disk.writer import DeltaFormat, VersionWriter
from vime.backends.vllm_utils.protocol import PauseMode
from vime.backends.vllm_utils.updates import Update
from vime.backends.vllm_utils.weight_folder import read_weight_folder, weight_names
from vime.errors import PublicationError

DESCRIPTION = """\
Publishes the weights of Qwen3-0.6B, in bf16, into an engine with 256 requests of 512 tokens in flight, over NCCL to the
other of two GPUs, through shared memory on one, over gloo on a CPU (there: a tiny model in float32). MODE is one of

  keep    running requests go on, and weights change between two steps; what vime does
  halt    running requests are frozen and go on afterwards, as where weights can't be changed between two steps
  wait    the engine first ends what runs
  abort   running requests are ended, their tokens thrown away, and the cache is dropped

  plain_s                     the same bytes by one plain broadcast to the other GPU (or process), or a copy in the GPU
  MODE_pause_s                seconds in which the engine made no step because of a publication, median: for keep as its
                              core measures it, the call's time and that of the copies on the GPU; for the others from
                              the first call that stops it to the last that lets it go on
  MODE_change_s               seconds in which no request was let in
  MODE_prepare_s              seconds before that, in which the engine sampled on
  pause_over_plain            keep_pause_s / plain_s; floor 2.0, goal 1.25
  pause_over_copy             the same on one GPU alone, which has no broadcast
  keep_swap_s                 the call that changes the weights, as its caller sees it; means
  halt_PART_s                 where the pause goes with halt; PART is stop (running requests halt), open, load (the
                              weights into the model), close (the version is raised and asked for) and resume; means
  ipc_*                       of two GPUs: the same as keep_*, trainer and engine on one of them, through shared memory
  ipc_pause_over_plain        ipc_pause_s over the plain broadcast between the two
  streamed_pause_s            of two GPUs: halt_pause_s when weights are sent in the pause, part by part, as those are
                              that have no room beside the model; else they are sent before it
  MODE_lost_tokens            of the WINDOW seconds around a publication: tokens that were not made at the rate of
                              half as many seconds right before, and those that were thrown away; medians
  MODE_lost_s                 the same in seconds of undisturbed sampling
  full_bytes, delta_bytes     written by a publication on disk: whole, and what has changed after a step
  full_s, delta_s             of it from its beginning to the engine's going on
  full_pause_s, delta_pause_s the engine's pause in it
  delta_over_full             bytes

Between versions every CHANGED_EVERY-th weight changes in its last bit, about as many as a step at a learning rate of
1e-6 changes in bf16; `python -m benchmarks.delta` trains to find out. --only chooses among the modes (running), shared
memory on two GPUs (ipc), weights that are sent in the pause (streamed), and whole versions and deltas (disk).
"""
CHANGED_EVERY = 64
TIMEOUT_S = 120.0
PUBLICATIONS = 2
"""Of each mode, after one that isn't counted."""
WINDOW_S, SMALL_WINDOW_S = 10.0, 3.0
MODES = ("keep", "halt", "wait", "abort")
CHOICES = ("running", "ipc", "streamed", "disk")


class ChangingWeights:
    """A checkpoint's weights on the trainer's device; each version differs from the one before in some last bits."""

    def __init__(self, checkpoint: Path, gpus: int) -> None:
        device, dtype = (torch.device("cuda", 0), torch.bfloat16) if gpus else (torch.device("cpu"), torch.float32)
        self._weights = [
            (name, tensor.to(device, dtype, copy=True).contiguous())
            for name, tensor in read_weight_folder(checkpoint, weight_names(checkpoint))
        ]
        self._steps = itertools.count()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self._weights)

    def step(self) -> None:
        """Make the next version."""
        first = next(self._steps) % CHANGED_EVERY
        for _, tensor in self._weights:
            bits = tensor.view(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
            bits[first::CHANGED_EVERY] ^= 1

    def named_hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._weights


class EverySource(Source):
    """One trainer rank in this process, for every transport."""

    async def write_version(self, version: int, *, full: bool) -> PublishedVersion:
        return await asyncio.to_thread(partial(self.rank.write_version, version, full=full))

    async def run_post_write_hook(self, folder: str, engine_names: list[str]) -> None:
        await asyncio.to_thread(self.rank.run_post_write_hook, folder, engine_names)

    async def remove_version(self, version: int) -> None:
        await asyncio.to_thread(self.rank.remove_version, version)

    async def share_next_part(self, version: int) -> dict[str, object] | None:
        return await asyncio.to_thread(self.rank.share_next_part, version)

    async def stop_sharing(self) -> None:
        await asyncio.to_thread(self.rank.stop_sharing)


class TimedClient(EngineClient):
    """Says how long the calls of each publication took."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.seconds: dict[str, list[float]] = {}

    async def pause(self, mode: PauseMode, *, timeout_s: float | None = None) -> None:
        await self._timed("stop", super().pause(mode, timeout_s=timeout_s))

    async def swap_weights(self, version: int) -> None:
        await self._timed("swap", super().swap_weights(version))

    async def start_weight_update(self) -> None:
        await self._timed("open", super().start_weight_update())

    async def update_weights(self, update: Update) -> None:
        await self._timed("load", super().update_weights(update))

    async def finish_weight_update(self, version: int) -> None:
        await self._timed("close", super().finish_weight_update(version))

    async def resume(self) -> None:
        await self._timed("resume", super().resume())

    async def _timed(self, part: str, call: Coroutine[Any, Any, None]) -> None:
        started = time.perf_counter()
        await call
        self.seconds.setdefault(part, []).append(time.perf_counter() - started)


class HaltingClient(TimedClient):
    """Of an engine that can't change weights between two steps."""

    async def swaps(self) -> bool:
        return False


class WaitingClient(HaltingClient):
    """Lets running requests end where others freeze them."""

    async def pause(self, mode: PauseMode, *, timeout_s: float | None = None) -> None:
        await super().pause("wait" if mode == "keep" else mode, timeout_s=timeout_s)


class Rig:
    """One engine under load, and what publishes into it."""

    def __init__(self, weights: ChangingWeights, transport: WeightTransport, address: str, stages: Stages) -> None:
        self._weights, self._transport, self._address = weights, transport, address
        self._window_s = SMALL_WINDOW_S if stages.small else WINDOW_S
        requests, tokens = (16, 128) if stages.small else (256, 512)
        self._load = (requests, tokens)
        self._version = 0
        self.parts: dict[str, float] = {}
        """Seconds of the calls of the last mode's publications."""

    @asynccontextmanager
    async def under_load(self, mode: str) -> Any:
        """Traffic, and a function that publishes one version under it."""
        kind = {"halt": HaltingClient, "wait": WaitingClient}.get(mode, TimedClient)
        admission = Admission()
        async with kind(self._address) as client:
            publisher = WeightPublisher(
                [client],
                self._transport,
                admission,
                start_version=self._version,
                flush_interval=1 if mode == "abort" else 0,
                timeout_s=TIMEOUT_S,
            )

            async def publish() -> Publication:
                await asyncio.to_thread(self._weights.step)
                publication = await publisher.publish()
                self._version = publisher.version
                if not publication.raised:
                    raise PublicationError(f"Version {publisher.version + 1} was not published: {publication.fenced}.")
                return publication

            await publish()  # the first one flushes, and meets the engine
            async with Traffic(client, admission, *self._load) as traffic:
                await publish()
                client.seconds.clear()
                yield traffic, publish
            self.parts = {f"{mode}_{part}_s": total(numbers) for part, numbers in client.seconds.items()}

    async def cost(self, mode: str) -> dict[str, float]:
        """Pause and lost tokens of one mode."""
        async with self.under_load(mode) as (traffic, publish):
            found = []
            for _ in range(PUBLICATIONS):
                undisturbed = await traffic.window(self._window_s / 2)
                around, publication = await self._around(traffic, publish)
                tokens = lost_tokens(undisturbed, around)
                lost = (tokens, tokens / undisturbed.tokens_per_s)
                found.append((publication.pause_s, publication.change_s, publication.prepare_s, *lost))
        names = ("pause_s", "change_s", "prepare_s", "lost_tokens", "lost_s")
        pairs = zip(names, zip(*found, strict=True), strict=True)
        return {f"{mode}_{name}": statistics.median(numbers) for name, numbers in pairs}

    async def _around(self, traffic: Traffic, publish: Callable[[], Any]) -> tuple[Window, Publication]:
        """The window whose middle a publication begins in."""

        async def in_the_middle() -> Publication:
            await asyncio.sleep(self._window_s / 2)
            return await publish()

        publishing = asyncio.create_task(in_the_middle())
        window = await traffic.window(self._window_s)
        return window, await publishing

    async def pauses(self, name: str) -> dict[str, float]:
        """Publications under load, without a look at the tokens; `name` begins the names of the values."""
        async with self.under_load("keep") as (_, publish):
            made = [await publish() for _ in range(PUBLICATIONS)]
        return {
            f"{name}_bytes": statistics.median(version.wire_bytes for version in made),
            f"{name}_s": statistics.median(version.prepare_s + version.change_s for version in made),
            f"{name}_pause_s": statistics.median(version.pause_s for version in made),
        }


def total(numbers: Sequence[float]) -> float:
    """Of all calls of a publication, for a typical one; shared memory is loaded by several."""
    return sum(numbers) / PUBLICATIONS


def lost_tokens(undisturbed: Window, around: Window) -> float:
    """Tokens of `around` that were not made, and those that nobody keeps."""
    return undisturbed.tokens_per_s * around.seconds - around.tokens + around.thrown_away


def running(stages: Stages, model: Path) -> dict[str, float]:
    """All modes on one engine, over the transport of these devices."""

    async def run(address: str, source: EverySource, weights: ChangingWeights) -> dict[str, float]:
        transport: WeightTransport = GroupTransport(source, streams=False, timeout_s=TIMEOUT_S)
        if stages.gpus == 1:
            transport = SharedTransport(source, stages=True)
        rig, found = Rig(weights, transport, address, stages), dict[str, float]()
        for mode in MODES:
            found |= await rig.cost(mode)
            if mode in ("keep", "halt"):
                found |= rig.parts
        return found

    return _from_memory(stages, model, run)


def through_shared_memory(stages: Stages, model: Path) -> dict[str, float]:
    """Trainer and engine on the first of two GPUs."""

    async def run(address: str, source: EverySource, weights: ChangingWeights) -> dict[str, float]:
        rig = Rig(weights, SharedTransport(source, stages=True), address, stages)
        return {name.replace("keep", "ipc"): value for name, value in (await rig.cost("keep") | rig.parts).items()}

    return _from_memory(stages, model, run, shares=True)


def streamed(stages: Stages, model: Path) -> dict[str, float]:
    """Weights that are sent while the engine stands still."""

    async def run(address: str, source: EverySource, weights: ChangingWeights) -> dict[str, float]:
        rig = Rig(weights, GroupTransport(source, streams=True, timeout_s=TIMEOUT_S), address, stages)
        return {"streamed_pause_s": (await rig.pauses("streamed"))["streamed_pause_s"]}

    return _from_memory(stages, model, run)


def _from_memory(stages: Stages, model: Path, run: Callable[..., Any], *, shares: bool = False) -> dict[str, float]:
    settings = PublishSettings(backend="nccl" if stages.gpus else "gloo")
    weights = ChangingWeights(model, stages.gpus)
    source = EverySource(TrainerWeights(weights, 0, settings))
    try:
        return _on_engine(stages, model, partial(run, source=source, weights=weights), shares=shares)
    finally:
        source.rank.close()


def on_disk(stages: Stages, model: Path, name: str) -> dict[str, float]:
    """Publications through a folder: "delta" or "full"."""
    folder = stages.folder / f"versions_{name}"
    shutil.rmtree(folder, ignore_errors=True)
    weights = ChangingWeights(model, stages.gpus)
    writer = partial(VersionWriter, delta=DeltaFormat() if name == "delta" else None, configuration=model)
    rank = TrainerWeights(weights, 0, PublishSettings(disk_dir=folder / "shared"), make_writer=writer)
    transport = DiskTransport(EverySource(rank), DiskSettings(local_dir=folder / "local"))

    async def run(address: str) -> dict[str, float]:
        rig = Rig(weights, transport, address, stages)
        return await rig.pauses(name)

    try:
        return _on_engine(stages, model, run)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _on_engine(stages: Stages, model: Path, run: Callable[[str], Any], *, shares: bool = False) -> dict[str, float]:
    """`shares`: the engine is where the trainer is, also where there are other GPUs."""
    is_shared = shares or stages.gpus == 1
    launch = engine_launch(model, stages.gpus, max_model_len=1024, gpu_share=ONE_GPU_SHARE if is_shared else None)
    with ready_engine(launch, 1 if is_shared else stages.gpus) as server:
        return asyncio.run(run(server.address))


def measure(stages: Stages) -> dict[str, float]:
    """Every value."""
    model = model_in(stages.folder / "model", small=stages.small)
    num_bytes = ChangingWeights(model, stages.gpus).num_bytes
    plain = stages.once("plain", lambda: {"plain_s": plain_seconds(num_bytes, stages.gpus, stages.folder)}, needs_s=60)
    found = plain
    if stages.wants("running"):
        found |= stages.once("running", lambda: running(stages, model), needs_s=180)
        yardstick = "copy" if stages.gpus == 1 else "plain"
        found[f"pause_over_{yardstick}"] = found["keep_pause_s"] / found["plain_s"]
    if stages.wants("ipc") and stages.gpus > 1:
        found |= stages.once("ipc", lambda: through_shared_memory(stages, model), needs_s=90)
        found["ipc_pause_over_plain"] = found["ipc_pause_s"] / found["plain_s"]
    if stages.wants("streamed") and stages.gpus != 1:
        found |= stages.once("streamed", lambda: streamed(stages, model), needs_s=75)
    if stages.wants("disk"):
        for name in ("full", "delta"):
            found |= stages.once(name, partial(on_disk, stages, model, name), needs_s=75)
        found["delta_over_full"] = found["delta_bytes"] / found["full_bytes"]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    words = DESCRIPTION.replace("WINDOW", f"{WINDOW_S:g}").replace("CHANGED_EVERY", str(CHANGED_EVERY))
    return run_part(Part("publication", words, measure, ("vllm", "torch"), CHOICES), argv)


if __name__ == "__main__":
    raise SystemExit(main())
