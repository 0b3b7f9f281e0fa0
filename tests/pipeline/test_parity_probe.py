"""What is asked of the engines, and what the trainer gets of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.parity_probe import MAX_TOKENS, probe_engines
from pipeline.probe_sequence import ProbeSequence, pack_probe
from tests.support.standin_engine import BLOCK_TOKENS, StandinEngine
from tests.support.tiny_models import build_tokenizer
from vime.backends.megatron_utils.context import ContextLayout, ContextShare
from vime.backends.megatron_utils.route_part import RoutePart
from vime.errors import EngineError, SampleError
from vime.settings.groups import Settings
from vime.settings.parse import parse_settings


def job(folder: Path, *words: str, prompt: str = "r01234=") -> Settings:
    build_tokenizer(folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"input": f"{n}{prompt}"}) + "\n" for n in range(9)))
    return parse_settings(
        ["--hf-checkpoint", str(folder), "--prompt-data", str(folder / "prompts.jsonl"),
         "--rollout-max-response-len", "6", *words]
    )  # fmt: skip


async def test_each_engine_is_asked_for_the_first_prompts_twice(tmp_path: Path) -> None:
    with StandinEngine() as one, StandinEngine() as other:
        found = await probe_engines(job(tmp_path, "--parity-probes", "3"), [one.address, other.address])
    assert [len(sequences) for sequences in found] == [6, 6]
    assert len({tuple(sequence.tokens[:8]) for sequence in found[0]}) == 3
    assert all(len(sequence.log_probs) == sequence.response_length <= 6 for sequence in found[0])
    assert not any(sequence.cached for sequence in found[0]), "these prompts fill no block"


async def test_the_second_time_the_prompt_comes_from_the_prefix_cache(tmp_path: Path) -> None:
    with StandinEngine() as engine:
        settings = job(tmp_path, "--parity-probes", "2", prompt="1" * (BLOCK_TOKENS + 1))
        (found,) = await probe_engines(settings, [engine.address])
    assert [sequence.cached for sequence in found] == [False, False, True, True]


async def test_long_responses_are_cut_short(tmp_path: Path) -> None:
    with StandinEngine() as engine:
        settings = job(tmp_path, "--parity-probes", "1", "--rollout-max-response-len", "500")
        (found,) = await probe_engines(settings, [engine.address])
    assert max(sequence.response_length for sequence in found) <= MAX_TOKENS


async def test_a_prompt_that_the_engine_refuses_is_left_out_of_the_comparison(tmp_path: Path) -> None:
    with StandinEngine() as engine:
        settings = job(tmp_path, "--parity-probes", "3")
        engine.faults.num_null_log_probs = 1
        (found,) = await probe_engines(settings, [engine.address])
    assert len(found) == 5


async def test_an_engine_that_refuses_every_prompt_is_told_with_its_reason(tmp_path: Path) -> None:
    with StandinEngine() as engine:
        settings = job(tmp_path, "--parity-probes", "2")
        engine.faults.num_null_log_probs = 4
        with pytest.raises(EngineError, match=r"log-probability of output token \d+ is nan"):
            await probe_engines(settings, [engine.address])


async def test_prompts_that_cannot_be_rendered_are_left_out_unless_all_are(tmp_path: Path) -> None:
    with StandinEngine() as engine:
        settings = job(tmp_path, "--parity-probes", "2")
        chat, text = '{"input": [{"role": "user", "content": "1="}]}\n', '{"input": "1="}\n'
        (tmp_path / "prompts.jsonl").write_text(chat + text)
        (found,) = await probe_engines(settings, [engine.address])
        assert len(found) == 2
        (tmp_path / "prompts.jsonl").write_text(chat)
        with pytest.raises(SampleError, match="The prompt is a chat"):
            await probe_engines(settings, [engine.address])


def sequence(num_tokens: int = 7, response: int = 3, **fields: object) -> ProbeSequence:
    return ProbeSequence(list(range(num_tokens)), response, [-0.5] * response, **fields)  # type: ignore[arg-type]


def test_the_trainer_gets_the_sequence_with_every_response_token_unmasked() -> None:
    packed = pack_probe(sequence(nucleus=[[4, 1], [5], [6, 0, 2]]), None)
    assert packed.tokens.tolist() == list(range(7))
    assert (packed.cu_seqlens.tolist(), packed.loss_mask.tolist()) == ([0, 7], [1, 1, 1])
    assert packed.nucleus is not None
    assert packed.nucleus.ids.tolist() == [4, 1, 5, 6, 0, 2]
    assert packed.nucleus.offsets.tolist() == [0, 2, 3, 6]
    assert packed.routes is None


def test_a_rank_gets_the_routes_of_its_layers_and_tokens() -> None:
    routes = np.arange(6 * 4 * 2).reshape(6, 4, 2)
    part = RoutePart((1, 3), (1, 3), 2, ContextShare(1, 2, ContextLayout.CONTIGUOUS))
    packed = pack_probe(sequence(routes=routes.tolist()), part)
    assert packed.routes is not None
    assert packed.routes.tokens.tolist() == [4, 5], "the last of its tokens has no routes"
    assert np.array_equal(packed.routes.ids, routes[4:6][:, [1, 3]])
    assert packed.routes.layers == (1, 3)
    assert pack_probe(sequence(), part).routes is None
