"""An engine of two workers, on one node and on two: it samples as one worker would, and publications reach both."""

from __future__ import annotations

import asyncio
import math
import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.vime.backends.vllm_utils.publications import checkpoint, transformers_reference
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.launch import EngineLaunch, EnginePart
from vime.backends.vllm_utils.protocol import GenerateRequest, GenerateResult, SampleColumns, Sampling
from vime.backends.vllm_utils.sender import WeightSender
from vime.backends.vllm_utils.server import EngineServer
from vime.backends.vllm_utils.updates import FromGroup, LoadStaged

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = [5, 9, 2, 7, 3, 3, 8]
NUM_TOKENS = 12


def launches(folder: Path, num_nodes: int) -> list[EngineLaunch]:
    """The engine's parts; all "nodes" are this machine."""
    whole = EngineLaunch(
        hf_checkpoint=folder / "first",
        host="127.0.0.1",
        port=0,
        log_path=folder / "engine.log",
        run_id="several",
        tensor_size=2,
        num_workers=2,
        max_model_len=128,
        columns=SampleColumns(num_candidates=3),
    )
    if num_nodes == 1:
        return [whole]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        replace(whole, log_path=folder / f"part_{number}.log", part=EnginePart(number, num_nodes, "127.0.0.1", port))
        for number in range(num_nodes)
    ]


async def sampled(client: EngineClient, salt: str) -> GenerateResult:
    return await client.generate(
        GenerateRequest(
            f"request-{salt}",
            PROMPT,
            Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
            cache_salt=salt,
            columns=SampleColumns(num_candidates=3),
        )
    )


async def publish(client: EngineClient, weights: object, version: int, *, swaps: bool) -> list[str]:
    """Send to both workers, and load; their states once the sender has heard that the digests agree."""
    workers = [client.address] * await client.world_size()
    with WeightSender("127.0.0.1", 0, 1 + len(workers), engine_names=workers, timeout_s=60.0) as sender:
        await client.init_weight_transfer(sender.init_info(1))
        await asyncio.to_thread(sender.connect)
        await client.stage_weights(FromGroup(version))
        await asyncio.to_thread(sender.send, weights)  # type: ignore[arg-type]
        states = [f"{status.version} {status.state}" for status in await client.staging()]
        if swaps:
            await client.swap_weights(version)
            return states
        await client.pause("keep")
        await client.start_weight_update()
        await client.update_weights(LoadStaged(version))
        await client.finish_weight_update(version)
        await client.resume()
    return states


@pytest.mark.parametrize("num_nodes", [1, 2])
async def test_two_workers_sample_and_load_weights_as_one(tmp_path: Path, num_nodes: int) -> None:
    first, second = checkpoint(tmp_path / "first", 0), checkpoint(tmp_path / "second", 1)
    reference = transformers_reference(tmp_path / "first")
    with ExitStack() as stack:
        servers = [stack.enter_context(EngineServer(launch)) for launch in launches(tmp_path, num_nodes)]
        await asyncio.to_thread(servers[0].wait_ready, timeout_s=250)
        async with EngineClient(servers[0].address) as client:
            assert await client.world_size() == 2
            before = await sampled(client, "before")
            assert before.token_ids == reference(first, PROMPT, NUM_TOKENS)
            assert all(-10 < value <= 0 and math.isfinite(value) for value in before.log_probs)
            assert before.candidates is not None
            assert before.candidates.ids[:, 0].tolist() == before.token_ids
            assert await publish(client, second, 1, swaps=False) == ["1 staged", "1 staged"]
            after = await sampled(client, "after")
            assert after.token_ids == reference(second, PROMPT, NUM_TOKENS)
            assert [span.version for span in after.version_spans] == [1]
            assert await publish(client, first, 2, swaps=True) == ["2 staged", "2 staged"]
            again = await sampled(client, "again")
            assert again.token_ids == before.token_ids
            assert [span.version for span in again.version_spans] == [2]
