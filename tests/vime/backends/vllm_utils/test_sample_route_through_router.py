"""vllm-router carries the sample route as it carries vLLM's own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import GenerateRequest, SampleColumns, Sampling

pytestmark = [pytest.mark.multiproc]


@pytest.fixture
def engine() -> Iterator[StandinEngine]:
    with StandinEngine() as engine:
        yield engine


@pytest.fixture
def router(tmp_path: Path, engine: StandinEngine) -> Iterator[str]:
    """Address of a router before one stand-in engine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with (tmp_path / "router.log").open("wb") as log:
        command = [sys.executable, "-m", "vllm_router.launch_router", "--worker-urls", engine.address]
        process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], stdout=log, stderr=log)
        try:
            _wait_until_healthy(address)
            yield address
        finally:
            process.terminate()
            process.wait(20)


def _wait_until_healthy(address: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < deadline, "the router did not start"
            time.sleep(0.1)


async def test_a_stream_comes_through_a_router_while_it_is_made(router: str, engine: StandinEngine) -> None:
    engine.faults.step_s = 0.02
    async with EngineClient(router) as client:
        async with contextlib.aclosing(client.stream(GenerateRequest("streamed", [1, 2, 3], Sampling(500)))) as pieces:
            assert len((await anext(pieces)).token_ids) == 5
            assert engine.num_pieces < 10
        async with asyncio.timeout(20):
            while engine.num_running:
                await asyncio.sleep(0.01)


async def test_columns_come_through_a_router_unchanged(router: str) -> None:
    async with EngineClient(router) as client:
        request = GenerateRequest("routed", [1, 2, 3], Sampling(5), columns=SampleColumns(3, True))
        result = await client.generate(request)
    assert len(result.token_ids) == 5
    assert result.candidates is not None
    assert result.candidates.ids.shape == (5, 3)
    assert result.routed_experts is not None
    assert result.routed_experts.shape == (7, 2, 2)
