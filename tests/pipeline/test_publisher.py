"""Publication: verified before the version rises; an engine is never left paused on old weights."""

import asyncio
from collections.abc import Iterator

import pytest
import torch

from pipeline.publisher import WeightPublisher
from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import GenerateRequest, Sampling
from vime.backends.vllm_utils.sender import GlooSender
from vime.errors import PublicationError

WEIGHTS = [("a", torch.arange(6.0)), ("b", torch.ones(2, 3))]


class Source:
    """A trainer's sender without a trainer."""

    def __init__(self) -> None:
        self.sender: GlooSender | None = None

    async def open_sender(self, engine_names: list[str]) -> list[dict[str, object]]:
        self.sender = GlooSender("127.0.0.1", 0, 1 + len(engine_names), engine_names=engine_names, timeout_s=10.0)
        return [self.sender.init_info(rank) for rank in range(1, 1 + len(engine_names))]

    async def connect_sender(self) -> None:
        assert self.sender is not None
        await asyncio.to_thread(self.sender.connect)

    async def send_weights(self) -> int:
        assert self.sender is not None
        return (await asyncio.to_thread(self.sender.send, WEIGHTS)).num_bytes


class Admission:
    """Remembers what the producers were told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def pause_admission(self) -> None:
        self.said.append("pause")

    async def resume_admission(self, policy_version: int) -> None:
        self.said.append(f"resume {policy_version}")


@pytest.fixture
def engines() -> Iterator[list[StandinEngine]]:
    with (
        StandinEngine(required_names=frozenset("ab")) as first,
        StandinEngine(required_names=frozenset("ab")) as second,
    ):
        yield [first, second]


class Rig:
    """A connected publisher over stand-in engines."""

    def __init__(
        self, engines: list[StandinEngine], *, start_version: int = 0, flush_interval: int = 0, timeout_s: float = 20.0
    ):
        self.engines = engines
        self.clients = [EngineClient(engine.address, control_timeout_s=2.0) for engine in engines]
        self.source, self.admission = Source(), Admission()
        self.publisher = WeightPublisher(
            self.clients,
            self.source,
            self.admission,
            start_version=start_version,
            flush_interval=flush_interval,
            timeout_s=timeout_s,
        )

    async def __aenter__(self) -> "Rig":
        await self.publisher.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            await client.close()
        if self.source.sender is not None:
            self.source.sender.close()

    async def paused(self) -> list[bool]:
        return [await client.is_paused() for client in self.clients]


async def is_running(rig: Rig) -> None:
    """Until the first engine works on a request and has made some tokens."""
    while (await rig.clients[0].metrics()).num_running == 0:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)


async def test_every_engine_holds_the_new_version_and_runs(engines: list[StandinEngine]) -> None:
    async with Rig(engines) as rig:
        publication = await rig.publisher.publish()
        assert (publication.version, publication.flushed, publication.num_bytes) == (1, True, 48)
        assert [engine.version for engine in engines] == ["1", "1"]
        assert await rig.paused() == [False, False]
        assert rig.admission.said == ["pause", "resume 1"]


async def test_versions_rise_by_one_and_continue_after_a_resume(engines: list[StandinEngine]) -> None:
    async with Rig(engines, start_version=7) as rig:
        versions = [(await rig.publisher.publish()).version for _ in range(3)]
        assert versions == [8, 9, 10]


async def test_kept_requests_go_on_with_the_new_weights(engines: list[StandinEngine]) -> None:
    engines[0].faults.step_s = 0.05
    async with Rig(engines) as rig:
        await rig.publisher.publish()
        request = GenerateRequest("r", [1, 2, 3], Sampling(max_tokens=60))
        running = asyncio.create_task(rig.clients[0].generate(request))
        await is_running(rig)
        publication = await rig.publisher.publish()
        result = await running
        assert not publication.flushed
        assert result.finish_reason == "length"
        assert [span.version for span in result.version_spans] == [1, 2]
        assert result.version_spans[1].stop == 60


async def test_flushing_publication_aborts_running_requests(engines: list[StandinEngine]) -> None:
    engines[0].faults.step_s = 0.05
    async with Rig(engines, flush_interval=1) as rig:
        await rig.publisher.publish()
        running = asyncio.create_task(rig.clients[0].generate(GenerateRequest("r", [1], Sampling(max_tokens=500))))
        await is_running(rig)
        assert (await rig.publisher.publish()).flushed
        assert (await running).finish_reason == "abort"


@pytest.mark.parametrize("fault", ["num_failed_updates", "num_damaged_updates"])
async def test_weights_that_did_not_arrive_whole_never_get_the_version(
    engines: list[StandinEngine], fault: str
) -> None:
    async with Rig(engines) as rig:
        await rig.publisher.publish()
        setattr(engines[1].faults, fault, 1)
        with pytest.raises(PublicationError, match="transferring weights"):
            await rig.publisher.publish()
        assert rig.publisher.version == 1
        assert engines[1].version == "1"
        assert (await rig.paused())[1], "an engine whose weights are in doubt serves nothing"
        assert rig.admission.said[-1] == "pause"


async def test_engine_that_cannot_pause_lets_the_others_go_on_with_the_old_weights(
    engines: list[StandinEngine],
) -> None:
    async with Rig(engines) as rig:
        await rig.publisher.publish()
        engines[1].faults.stuck = True
        with pytest.raises(PublicationError, match="pausing"):
            await rig.publisher.publish()
        engines[1].faults.stuck = False
        assert (await rig.paused())[0] is False
        assert rig.publisher.version == 1
        assert rig.admission.said[-1] == "resume 1"


async def test_without_engines_a_publication_only_counts() -> None:
    admission = Admission()
    publisher = WeightPublisher([], Source(), admission, start_version=4, flush_interval=0, timeout_s=1.0)
    await publisher.connect()
    publication = await publisher.publish()
    assert (publication.version, publication.num_bytes, publisher.version) == (5, 0, 5)
    assert admission.said == ["resume 5"]
