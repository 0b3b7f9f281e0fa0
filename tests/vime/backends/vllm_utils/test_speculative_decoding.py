"""What a real engine that drafts tells of its requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny_models import build_tiny_qwen3
from tests.vime.backends.vllm_utils.publications import transformers_reference
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.launch import EngineLaunch
from vime.backends.vllm_utils.protocol import GenerateRequest, Sampling
from vime.backends.vllm_utils.server import EngineServer

DRAFTED = 3
PROMPT, NUM_TOKENS = [5, 6, 7, 5, 6, 7, 5, 6], 24


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(400)
async def test_an_engine_that_drafts_samples_the_same_tokens_and_says_how_many_drafts_it_accepted(
    tmp_path: Path,
) -> None:
    build_tiny_qwen3(tmp_path / "model", seed=0)
    drafting = {"method": "ngram", "num_speculative_tokens": DRAFTED, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    launch = EngineLaunch(
        tmp_path / "model",
        "127.0.0.1",
        0,
        tmp_path / "engine.log",
        "test",
        max_model_len=64,
        extra_args=("--speculative-config", json.dumps(drafting)),
    )
    sampling = Sampling(NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with EngineServer(launch) as server:
        server.wait_ready(timeout_s=350)
        async with EngineClient(server.address) as client:
            whole = await client.generate(GenerateRequest("whole", PROMPT, sampling))
            pieces = [piece async for piece in client.stream(GenerateRequest("pieces", PROMPT, sampling))]
    assert whole.token_ids == transformers_reference(tmp_path / "model")([], PROMPT, NUM_TOKENS)
    drafts = whole.drafts
    assert drafts is not None
    assert 0 <= drafts.num_accepted <= drafts.num_drafted <= DRAFTED * drafts.num_steps
    assert 1 <= drafts.num_steps <= NUM_TOKENS - drafts.num_accepted
    assert pieces[-1].drafts == drafts
    assert all(piece.drafts is None for piece in pieces[:-1])
