"""The sample route of a real engine with experts: routes against the routers of the model, and a wounded plug-in."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.tiny_models import build_tiny_qwen3
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.launch import EngineLaunch
from vime.backends.vllm_utils.protocol import GenerateRequest, GenerateResult, SampleColumns, Sampling
from vime.backends.vllm_utils.server import EngineServer
from vime.errors import EngineStartError

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(240)]

COLUMNS = SampleColumns(num_candidates=8, routes=True, nucleus=True)
BLOCKS = 9
"""Blocks of the cache, 128 tokens each: three requests of 300 tokens fit at a time."""
_IDS = itertools.count()

Reference = Callable[[list[int]], tuple[npt.NDArray[Any], npt.NDArray[Any]]]
"""Token ids [T] -> experts [T, L, K], each row sorted, and log-probabilities [T, V] of the next token."""


def launch(folder: Path, **changes: Any) -> EngineLaunch:
    whole = EngineLaunch(folder / "model", "127.0.0.1", 0, folder / "engine.log", "test", max_model_len=512)
    return replace(whole, **changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    build_tiny_qwen3(folder / "model", init_std=0.08, num_experts=8, max_position_embeddings=512)
    return folder


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    blocks = ("--num-gpu-blocks-override", str(BLOCKS))
    with EngineServer(launch(model, columns=COLUMNS, extra_args=blocks)) as server:
        server.wait_ready(timeout_s=200)
        yield server.address


@pytest.fixture
async def client(address: str) -> AsyncIterator[EngineClient]:
    async with EngineClient(address, generate_timeout_s=100.0) as client:
        yield client


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model / "model", dtype=torch.float32).eval()

    @torch.no_grad()
    def compute(tokens: list[int]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        found = network(torch.tensor([tokens]), output_router_logits=True)
        experts = np.stack([layer.topk(2, dim=-1).indices.numpy() for layer in found.router_logits], axis=1)
        return np.sort(experts, axis=-1), found.logits[0].log_softmax(-1).numpy()

    return compute


def request(prompt: list[int], num_tokens: int, **changes: Any) -> GenerateRequest:
    shape = {"top_p": changes.pop("top_p", 1.0), "temperature": changes.pop("temperature", 1.0)}
    sampling = Sampling(num_tokens, seed=next(_IDS), ignore_eos=True, **shape)
    return replace(GenerateRequest(f"request-{next(_IDS)}", prompt, sampling, columns=COLUMNS), **changes)


def check_routes(asked: GenerateRequest, result: GenerateResult, reference: Reference) -> None:
    """The routes are those of the model's routers, from the first row asked for to the last token but one."""
    experts, _ = reference(asked.token_ids + result.token_ids)
    assert result.routed_experts is not None
    assert result.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(np.sort(result.routed_experts, axis=-1), experts[asked.routes_from : -1])


async def test_routes_and_candidates_are_those_of_the_model(client: EngineClient, reference: Reference) -> None:
    asked = request([5, 6, 7, 8], 100)
    result = await client.generate(asked)
    check_routes(asked, result, reference)
    _, log_probs = reference(asked.token_ids + result.token_ids)
    rows = log_probs[3:-1]
    assert result.candidates is not None
    own = rows[np.arange(100), result.token_ids]
    np.testing.assert_allclose(result.log_probs, own, atol=1e-4)
    np.testing.assert_allclose(result.candidates.log_probs, -np.sort(-rows, axis=1)[:, :8], atol=1e-4)
    np.testing.assert_allclose(
        np.take_along_axis(rows, result.candidates.ids, 1), result.candidates.log_probs, atol=1e-4
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
async def test_log_probabilities_are_those_of_the_distribution_that_was_sampled(
    client: EngineClient, reference: Reference, temperature: float
) -> None:
    """So the trainer's ratio begins at one, whatever the temperature."""
    asked = request([12, 13, 14], 100, temperature=temperature)
    result = await client.generate(asked)
    _, log_probs = reference(asked.token_ids + result.token_ids)
    scaled = log_probs[2:-1] / temperature
    scaled -= np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    own = scaled[np.arange(100), result.token_ids]
    assert np.abs(result.log_probs - own).mean() < 1e-4
    assert np.exp(own - result.log_probs).mean() == pytest.approx(1.0, abs=1e-4)
    assert result.candidates is not None
    np.testing.assert_allclose(result.candidates.log_probs, -np.sort(-scaled, axis=1)[:, :8], atol=1e-4)


async def test_nuclei_are_renormalised_over_what_top_p_leaves(client: EngineClient, reference: Reference) -> None:
    asked = request([9, 10, 11], 60, top_p=0.7)
    result = await client.generate(asked)
    _, log_probs = reference(asked.token_ids + result.token_ids)
    assert result.nucleus is not None
    for position, row in enumerate(log_probs[2:-1]):
        part = slice(result.nucleus.offsets[position], result.nucleus.offsets[position + 1])
        ids, values = result.nucleus.ids[part], result.nucleus.log_probs[part]
        assert set(ids.tolist()) == set(np.argsort(-row)[: len(ids)].tolist())
        mass = np.exp(row[ids]).sum()
        assert mass - np.exp(row[ids]).min() < 0.7 < mass + 1e-4
        np.testing.assert_allclose(values, row[ids] - np.log(mass), atol=1e-4)


async def test_routes_are_complete_when_the_cache_brings_a_part_of_the_prompt(
    client: EngineClient, reference: Reference
) -> None:
    prompt = [3 + position % 40 for position in range(300)]
    for _ in range(2):
        asked = request(prompt, 5, cache_salt="shared")
        result = await client.generate(asked)
        check_routes(asked, result, reference)
    assert result.num_cached_tokens == 256


async def test_a_continuation_gets_the_rows_that_are_missing(client: EngineClient, reference: Reference) -> None:
    first = request([5, 6, 7], 20)
    result = await client.generate(first)
    tokens = first.token_ids + result.token_ids
    asked = request(tokens, 10, routes_from=len(tokens) - 1)
    continued = await client.generate(asked)
    assert continued.routed_experts is not None
    assert len(continued.routed_experts) == 10
    check_routes(asked, continued, reference)


async def test_routes_stay_complete_when_requests_are_preempted(
    client: EngineClient, address: str, reference: Reference
) -> None:
    asked = [request([5 + number, 6, 7], 300) for number in range(6)]
    results = await asyncio.gather(*[client.generate(one) for one in asked])
    assert num_preemptions(address) > 0
    for one, result in zip(asked, results, strict=True):
        check_routes(one, result, reference)
        assert result.candidates is not None
        assert len(result.candidates.ids) == 300


async def test_an_aborted_request_has_the_routes_of_its_tokens(client: EngineClient, reference: Reference) -> None:
    asked = request([5, 6, 7], 400)
    task = asyncio.create_task(client.generate(asked))
    while (await client.metrics()).num_running == 0:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    await client.pause("abort")
    result = await task
    await client.resume()
    assert result.finish_reason == "abort"
    assert result.token_ids
    check_routes(asked, result, reference)


def test_an_engine_whose_plug_in_is_wounded_does_not_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another plug-in makes vime's take other log-probabilities."""
    (tmp_path / "wound.py").write_text(
        "from vime.backends.vllm_utils.plugin import core_columns\n"
        "def register():\n"
        "    pack = core_columns.pack_rows\n"
        "    core_columns.pack_rows = lambda ids, log_probs: pack(ids, log_probs - 0.5)\n"
    )
    info = tmp_path / "wound-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wound\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nwound = wound:register\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(":"))
    server = EngineServer(launch(model, log_path=tmp_path / "engine.log"))
    with server, pytest.raises(EngineStartError, match=r"vime's sample route differs from vLLM 0\.32") as caught:
        server.wait_ready(timeout_s=200)
    assert "log-probabilities" in str(caught.value)
    assert caught.value.next_step == "Use a vLLM that vime is tested with (0.26 or 0.32)."


def num_preemptions(address: str) -> float:
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(map(float, re.findall(r"^vllm:num_preemptions_total\{[^}]*\} (\S+)$", text, re.MULTILINE)))
