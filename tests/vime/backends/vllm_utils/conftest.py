"""One engine of each kind for the contract tests, and publications into it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest
import torch

from tests.support.standin_engine import StandinEngine
from tests.support.tiny_models import VOCAB_SIZE
from tests.vime.backends.vllm_utils.publications import (
    MAX_MODEL_LEN,
    EngineUnderTest,
    Publisher,
    checkpoint,
    transformers_reference,
)
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.launch import EngineLaunch
from vime.backends.vllm_utils.protocol import SampleColumns
from vime.backends.vllm_utils.sender import WeightSender
from vime.backends.vllm_utils.server import EngineServer


@pytest.fixture(
    scope="module",
    params=["standin", pytest.param("real", marks=[pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(240)])],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    """The stand-in and the real engine, one of each for a module."""
    folder = tmp_path_factory.mktemp("engine")
    first, second = checkpoint(folder / "first", 0), checkpoint(folder / "second", 1)
    with ExitStack() as stack:
        if request.param == "standin":
            names = frozenset(name for name, _ in first)
            standin = stack.enter_context(StandinEngine(VOCAB_SIZE, MAX_MODEL_LEN, names))
            standin.load(first)
            standin.swaps = True
            yield EngineUnderTest(standin.address, VOCAB_SIZE, first, second, standin.greedy)
        else:
            reference = transformers_reference(folder / "first")
            launch = EngineLaunch(
                hf_checkpoint=folder / "first",
                host="127.0.0.1",
                port=0,
                log_path=folder / "engine.log",
                run_id="contract",
                max_model_len=MAX_MODEL_LEN,
                device="gpu" if torch.cuda.is_available() else "cpu",
                dtype="float32",
                extra_args=("--enforce-eager",),
                columns=SampleColumns(num_candidates=VOCAB_SIZE, nucleus=True),
            )
            server = stack.enter_context(EngineServer(launch))
            seconds = server.wait_ready(timeout_s=200)
            print(f"real engine ready after {seconds:.1f} s")
            yield EngineUnderTest(server.address, VOCAB_SIZE, first, second, reference, server.launch.log_path)


@pytest.fixture
async def client(engine: EngineUnderTest) -> AsyncIterator[EngineClient]:
    """A client of the engine; the engine is left running, not paused."""
    async with EngineClient(engine.address, control_timeout_s=20.0, generate_timeout_s=60.0) as client:
        yield client
        await client.abort_all()
        await client.resume()


@pytest.fixture
async def publisher(client: EngineClient, engine: EngineUnderTest) -> AsyncIterator[Publisher]:
    """A connected publisher; afterwards the engine holds its first weights again."""
    with WeightSender("127.0.0.1", 0, 2, engine_names=[engine.address], timeout_s=20.0) as sender:
        publisher = Publisher(client, sender)
        await publisher.join()
        yield publisher
        await publisher.publish(engine.first)
