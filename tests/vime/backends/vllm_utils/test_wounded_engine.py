"""Publications into a real engine that stalls or dies in the middle of one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from pipeline.publisher import WeightPublisher
from pipeline.trainer_weights import PublishSettings, TrainerWeights
from pipeline.weight_transports.group import GroupTransport
from tests.pipeline.publication_rig import Admission, Source
from tests.vime.backends.vllm_utils.publications import MAX_MODEL_LEN, Weights, checkpoint
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.launch import EngineLaunch
from vime.backends.vllm_utils.protocol import GenerateRequest, GenerateResult, Sampling
from vime.backends.vllm_utils.server import EngineServer
from vime.errors import EngineError, PublicationError

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(280)]

TIMEOUT_S = 12.0


class Trainer:
    """Gives one of two sets of weights; what `on_first_tensor` does comes in the middle of the gathering."""

    def __init__(self, sets: list[Weights]) -> None:
        self.sets, self.chosen = sets, 0
        self.wound = lambda: None

    def named_hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(self.sets[self.chosen]):
            if number == len(self.sets[0]) // 2:
                self.wound()
            yield item


class Rig:
    def __init__(self, server: EngineServer, client: EngineClient, sets: list[Weights]) -> None:
        self.server, self.client, self.trainer, self.admission = server, client, Trainer(sets), Admission()
        self.source = Source(self.trainer)  # type: ignore[arg-type]
        self.source.rank = TrainerWeights(self.trainer, 0, PublishSettings(buffer_bytes=1 << 16))
        transport = GroupTransport(self.source, streams=False, timeout_s=TIMEOUT_S)
        self.publisher = WeightPublisher(
            [client], transport, self.admission, start_version=0, flush_interval=0, timeout_s=TIMEOUT_S
        )

    def processes(self) -> list[psutil.Process]:
        """The engine's own processes, below its supervisor."""
        return psutil.Process(self.server.pid).children(recursive=True)

    def signal(self, number: int) -> None:
        for process in self.processes():
            os.kill(process.pid, number)

    async def sample(self, num_tokens: int = 12, salt: str | None = None) -> GenerateResult:
        sampling = Sampling(num_tokens, temperature=0.0, ignore_eos=True)
        return await self.client.generate(GenerateRequest(f"r{time.monotonic()}", [5, 6, 7], sampling, salt))


async def test_a_real_engine_that_stalls_answers_errors_or_dies_never_labels_tokens_wrongly(tmp_path: Path) -> None:
    """One engine for all, since its start takes most of the time; dying comes last."""
    sets = [checkpoint(tmp_path / name, seed) for seed, name in enumerate(("first", "second"))]
    launch = EngineLaunch(
        hf_checkpoint=tmp_path / "first",
        host="127.0.0.1",
        port=0,
        log_path=tmp_path / "engine.log",
        run_id="wounded",
        max_model_len=MAX_MODEL_LEN,
    )
    with EngineServer(launch) as server:
        await asyncio.to_thread(server.wait_ready, timeout_s=200)
        async with EngineClient(server.address) as client:
            rig = Rig(server, client, sets)
            await rig.publisher.publish()
            old = await rig.sample(salt="v1")
            await stall(rig, old)
            await answer_errors(rig, old)
            await die(rig)
            rig.source.rank.close()


async def stall(rig: Rig, old: GenerateResult) -> None:
    """All its processes stop in the middle of a transfer, and go on when the publication has given up."""
    running = asyncio.create_task(rig.sample(1500, salt="long"))
    await asyncio.sleep(0.3)
    rig.trainer.chosen = 1
    rig.trainer.wound = lambda: rig.signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(PublicationError, match="served by no engine") as error:
        await rig.publisher.publish()
    assert rig.client.address in error.value.engines
    assert time.monotonic() - started < TIMEOUT_S + 25.0
    rig.trainer.wound = lambda: None
    rig.signal(signal.SIGCONT)
    assert await rig.client.weight_version() == 1
    assert not await rig.client.is_paused()
    result = await running
    assert {span.version for span in result.version_spans} == {1}, "the version that did not make it labels nothing"
    assert (await rig.sample(salt="after a stall")).token_ids == old.token_ids


async def answer_errors(rig: Rig, old: GenerateResult) -> None:
    """A set that lacks a tensor is refused after loading has begun; a whole one repairs the engine."""
    whole = rig.trainer.sets[1]
    rig.trainer.sets[1] = [item for item in whole if not item[0].endswith("layers.1.self_attn.k_proj.weight")]
    with pytest.raises(PublicationError, match="don't fill 1 layers of the model"):
        await rig.publisher.publish()
    assert await rig.client.is_paused(), "an engine with a mix serves nothing"
    assert await rig.client.weight_version() == 1
    rig.trainer.sets[1] = whole
    publication = await rig.publisher.publish()
    assert (publication.raised, publication.fenced) == (True, {})
    changed = await rig.sample(salt="repaired")
    assert changed.version_spans[0].version == publication.version
    assert changed.token_ids != old.token_ids


async def die(rig: Rig) -> None:
    """Killed in the middle of a transfer: named within the deadline, and its requests end with an error."""
    running = asyncio.create_task(rig.sample(1500))
    await asyncio.sleep(0.3)
    rig.trainer.wound = lambda: rig.signal(signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PublicationError, match="served by no engine") as error:
        await rig.publisher.publish()
    assert time.monotonic() - started < TIMEOUT_S + 25.0
    assert rig.client.address in error.value.engines
    with pytest.raises(EngineError):
        await running
