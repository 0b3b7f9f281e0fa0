"""A publisher over stand-in engines, with a trainer's side that needs no trainer, and requests that watch labels."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from pipeline.publication import Publication
from pipeline.publisher import WeightPublisher
from pipeline.trainer_weights import PublishSettings, TrainerWeights
from pipeline.weight_transports.disk import DiskSettings, DiskTransport, PublishedVersion
from pipeline.weight_transports.group import GroupTransport
from pipeline.weight_transports.transport import WeightTransport
from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.disk.writer import DeltaFormat, VersionWriter
from vime.backends.vllm_utils.protocol import GenerateRequest, GenerateResult, Sampling
from vime.errors import EngineError

Weights = list[tuple[str, torch.Tensor]]


@contextmanager
def two_engines(step_s: float | None = None) -> Iterator[list[StandinEngine]]:
    """Stand-ins that want the weights of `Trainer`, each of whose steps takes `step_s`."""
    names = frozenset("ab")
    with StandinEngine(required_names=names) as first, StandinEngine(required_names=names) as second:
        if step_s is not None:
            first.faults.step_s = second.faults.step_s = step_s
        yield [first, second]


class Trainer:
    """Its weights change with every `step`."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.fails_with: Exception | None = None

    def step(self) -> None:
        self.num_steps += 1

    def named_hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.arange(6.0) + self.num_steps
        if self.fails_with is not None:
            raise self.fails_with
        yield "b", torch.ones(2, 3)


class Source:
    """The calls of `Workers` that a publication makes, on one rank in this process."""

    def __init__(self, trainer: Trainer, disk_dir: Path | None = None, hook: str | None = None) -> None:
        self.rank = TrainerWeights(
            trainer,
            0,
            PublishSettings(disk_dir=disk_dir, post_write_hook=hook),
            make_writer=lambda root: VersionWriter(root, delta=DeltaFormat()),
        )
        self.written: list[tuple[int, bool]] = []
        """Version, and whether it was asked to be whole."""

    async def open_sender(self, engine_names: list[str], timeout_s: float) -> list[dict[str, object]]:
        return await asyncio.to_thread(self.rank.open_sender, "127.0.0.1", engine_names, timeout_s)

    async def connect_sender(self) -> None:
        await asyncio.to_thread(self.rank.connect_sender)

    async def send_weights(self) -> int:
        return await asyncio.to_thread(self.rank.send)

    async def write_version(self, version: int, *, full: bool) -> PublishedVersion:
        self.written.append((version, full))
        return await asyncio.to_thread(self.rank.write_version, version, full=full)

    async def run_post_write_hook(self, folder: str, engine_names: list[str]) -> None:
        await asyncio.to_thread(self.rank.run_post_write_hook, folder, engine_names)

    async def remove_version(self, version: int) -> None:
        self.rank.remove_version(version)


class Admission:
    """Remembers what the producers were told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.serving: list[str] = []

    async def pause_admission(self) -> None:
        self.said.append("pause")

    async def resume_admission(self, policy_version: int, serving: list[str]) -> None:
        self.said.append(f"resume {policy_version}")
        self.serving = serving

    async def serve_only(self, serving: list[str]) -> None:
        self.said.append("serve only")
        self.serving = serving


class Rig:
    """Use with `async with`. Each publication is of weights that a step of the trainer has changed."""

    def __init__(
        self,
        engines: list[StandinEngine],
        *,
        start_version: int = 0,
        flush_interval: int = 0,
        timeout_s: float = 20.0,
        folder: Path | None = None,
        streams: bool = False,
        streams_after_failure: bool = False,
        compare_first: bool = False,
        disk: DiskSettings | None = None,
        hook: str | None = None,
        replace: Callable[[str, str], None] | None = None,
        make_client: Callable[[str], EngineClient] = EngineClient,
        tell_fenced: Callable[[Mapping[str, str]], None] | None = None,
        lend_to_engines: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        note_tried: Callable[[int], None] | None = None,
    ) -> None:
        """With `folder` versions go through disk, to a copy on the host unless `disk` says otherwise."""
        self.engines = engines
        self.clients = [make_client(engine.address) for engine in engines]
        self.trainer, self.admission = Trainer(), Admission()
        self.source = Source(self.trainer, None if folder is None else folder / "published", hook)
        transport: WeightTransport = GroupTransport(
            self.source, streams=streams, streams_after_failure=streams_after_failure, timeout_s=timeout_s
        )
        if folder is not None:
            transport = DiskTransport(self.source, disk or DiskSettings(local_dir=folder / "local"))
        self.transport = transport
        self.publisher = WeightPublisher(
            self.clients,
            transport,
            self.admission,
            start_version=start_version,
            flush_interval=flush_interval,
            timeout_s=timeout_s,
            compare_first=compare_first,
            replace=replace,
            tell_fenced=tell_fenced,
            lend_to_engines=lend_to_engines,
            note_tried=note_tried,
        )
        self._numbers = itertools.count()
        self._digests: dict[int, str] = {}

    async def __aenter__(self) -> Rig:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            await client.close()
        self.source.rank.close()

    async def publish(self) -> Publication:
        """Train a step and publish."""
        self.trainer.step()
        publication = await self.publisher.publish()
        if publication.raised:
            self._digests[publication.version] = digest_of(self.trainer)
        return publication

    def generate(self, engine: int = 0, max_tokens: int = 60) -> asyncio.Task[GenerateResult]:
        """A request to one engine, as a task."""
        request = GenerateRequest(f"r{next(self._numbers)}", [1, 2, 3], Sampling(max_tokens=max_tokens))
        return asyncio.create_task(self.clients[engine].generate(request))

    def check_labels(self, engine: int, result: GenerateResult) -> None:
        """Every token is the one that the weights of its label make."""
        for span in result.version_spans:
            for position in range(span.start, span.stop):
                before = [1, 2, 3, *result.token_ids[:position]]
                token = self.engines[engine].next_token(before, self._digests[span.version])
                assert token == result.token_ids[position], (span, position)

    def forget_group(self) -> None:
        """Let the next publication join all engines anew."""
        assert isinstance(self.transport, GroupTransport)
        self.transport.leave()

    async def paused(self) -> list[bool]:
        return [await client.is_paused() for client in self.clients]

    async def check_standing(self) -> None:
        """Every engine serves the publisher's version with its very weights, or is named and gets no requests."""
        for engine in self.engines:
            if engine.address in self.admission.serving:
                assert engine.version == str(self.publisher.version)
                assert engine.weights_digest == self._digests[self.publisher.version]
                assert not engine.is_paused
            else:
                assert self.publisher.fenced[engine.address]


def digest_of(trainer: Trainer) -> str:
    """What a stand-in makes of the trainer's weights."""
    engine = StandinEngine()
    engine.load(trainer.named_hf_weights())
    return engine.weights_digest


async def is_running(rig: Rig, engine: int = 0) -> None:
    """Until an engine works on a request and has made some tokens."""
    while (await rig.clients[engine].metrics()).num_running == 0:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)


async def outcome(task: asyncio.Task[GenerateResult]) -> GenerateResult | None:
    """The result of a request, None when its engine failed it."""
    try:
        return await task
    except EngineError:
        return None
