"""What is asked of the engines, what the trainer gets of it, and what becomes of a difference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pipeline.parity_probe import (
    MAX_TOKENS,
    EngineParity,
    ProbeSequence,
    engine_parity,
    pack_probe,
    probe_engines,
    refuse_difference,
)
from tests.support.standin_engine import BLOCK_TOKENS, StandinEngine
from tests.support.tiny_models import build_tokenizer
from vime.backends.megatron_utils.context import ContextLayout, ContextShare
from vime.backends.megatron_utils.route_part import RoutePart
from vime.errors import EngineError, ParityError
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


class Trainer:
    """Scores -0.5 for each token, plus what it is told to be off, and remembers what it was asked for."""

    def __init__(self, off: float, start_off: float = 0.0) -> None:
        self._off, self._start_off = off, start_off
        self.asked: list[bool] = []

    async def score(self, sequences: Sequence[ProbeSequence], start_weights: bool) -> dict[str, list[float]]:
        self.asked.append(start_weights)
        count = sum(each.response_length for each in sequences)
        if start_weights:
            return {"start_weights": [-0.5 + self._start_off] * count}
        values = [-0.5 + self._off] * count
        return dict.fromkeys(("trainer", "raw", "unscaled", "other_head"), values)


async def compared(trainer: Trainer, *sequences: ProbeSequence) -> EngineParity:
    return await engine_parity("Engine 0", sequences, trainer.score, temperature=1.0, threshold=0.05)


async def test_where_engine_and_trainer_agree_start_weights_are_not_tried() -> None:
    trainer = Trainer(0.0)
    found = await compared(trainer, sequence(), sequence(9, 4))
    assert trainer.asked == [False]
    assert str(found) == "Engine 0 against the trainer on 7 tokens: mean 0, p99 0, max 0."
    refuse_difference([found], 0.05)


async def test_a_difference_below_the_threshold_is_told_and_allowed() -> None:
    trainer = Trainer(0.01)
    found = await compared(trainer, sequence())
    assert trainer.asked == [False]
    assert "Engine 0 against the trainer on 3 tokens: mean 0.01" in str(found)
    refuse_difference([found], 0.05)


async def test_weights_of_the_start_are_tried_where_nothing_else_explains_a_difference() -> None:
    trainer = Trainer(0.3, start_off=0.001)
    found = await compared(trainer, sequence())
    assert trainer.asked == [False, True]
    with pytest.raises(ParityError, match="stale_weights: the sampler still has the weights") as caught:
        refuse_difference([found], 0.05)
    assert "mean 0.3" in str(caught.value)
    assert "Allowed: a mean of 0.05 (--parity-threshold)" in str(caught.value)
    assert "restart the run" in (caught.value.next_step or "")


async def test_a_difference_without_a_known_fault_stops_too() -> None:
    found = await compared(Trainer(0.3, start_off=0.3), sequence())
    with pytest.raises(ParityError) as caught:
        refuse_difference([found], 0.05)
    assert "No known fault explains it" in (caught.value.next_step or "")


async def test_an_engine_that_samples_nothing_is_refused() -> None:
    with pytest.raises(EngineError, match="Engine 0 sampled no token of any probe"):
        await compared(Trainer(0.0))
