"""What an engine on a GPU leaves of its memory while it sleeps, and that it comes back as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.vime.backends.vllm_utils.publications import checkpoint
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.launch import EngineLaunch
from vime.backends.vllm_utils.protocol import GenerateRequest, Sampling
from vime.backends.vllm_utils.server import EngineServer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.timeout(400),
]

CACHE_GIB = 4


def free_gib() -> float:
    free_bytes, _ = torch.cuda.mem_get_info()
    return float(free_bytes) / 2**30


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineServer]:
    checkpoint(tmp_path / "model", 0)
    launch = EngineLaunch(
        hf_checkpoint=tmp_path / "model",
        host="127.0.0.1",
        port=0,
        log_path=tmp_path / "engine.log",
        run_id="sleep",
        device="gpu",
        sleeps=True,
        max_model_len=512,
        extra_args=("--enforce-eager", "--kv-cache-memory-bytes", str(CACHE_GIB << 30)),
    )
    with EngineServer(launch) as server:
        server.wait_ready(timeout_s=300)
        yield server


async def test_a_sleeping_engine_leaves_its_cache_and_its_weights_and_wakes_as_it_was(engine: EngineServer) -> None:
    sampling = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)
    async with EngineClient(engine.address) as client:
        before = await client.generate(GenerateRequest("before", [3, 4, 5, 6], sampling))
        awake = free_gib()
        await client.pause("abort")
        await client.sleep()
        asleep = free_gib()
        await client.wake_up(["weights"])
        half = free_gib()
        await client.wake_up(["kv_cache"])
        await client.resume()
        after = await asyncio.wait_for(client.generate(GenerateRequest("after", [3, 4, 5, 6], sampling)), 60)
        print(
            f"free GiB: {awake:.2f} awake, {asleep:.2f} asleep, {half:.2f} with weights, {free_gib():.2f} awake again"
        )
    assert after.token_ids == before.token_ids
    assert after.num_cached_tokens == 0
    assert asleep - awake > 0.95 * CACHE_GIB
    assert asleep - half < 1.0
    assert half - free_gib() > 0.95 * CACHE_GIB
