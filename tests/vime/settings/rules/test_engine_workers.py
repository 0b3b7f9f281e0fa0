"""How the GPUs of one engine are shared out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.settings.parse import parse_settings
from vime.settings.placement import Demand
from vime.settings.refusals import refused
from vime.settings.rules.quantities import EngineWorkers, demand_of, engine_kinds, engine_workers, own_engines

SIZE = st.integers(1, 4)


@given(SIZE, SIZE, SIZE, SIZE)
def test_the_tensor_size_is_what_the_other_sizes_leave(tensor: int, data: int, pipeline: int, context: int) -> None:
    total = math.prod((tensor, data, pipeline, context))
    words = f"--rollout-num-gpus-per-engine {total} --vllm-data-parallel-size {data} --vllm-pipeline-parallel-size "
    words += f"{pipeline} --vllm-prefill-context-parallel-size {context}"
    workers = engine_workers(own_engines(parse_settings(words.split()))[0])
    assert workers == EngineWorkers(tensor, data, pipeline, context)
    assert workers.total == total


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--actor-num-gpus-per-node 2 --rollout-num-gpus 4", Demand((2,), (1, 1, 1, 1), engines_per_node=8)),
        ("--actor-num-gpus-per-node 2 --rollout-num-gpus-per-engine 4", Demand((2,), (4,), engines_per_node=8)),
        (
            "--actor-num-nodes 2 --actor-num-gpus-per-node 4 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 8 "
            "--num-gpus-per-node 4",
            Demand((4, 4), (8,), engines_per_node=4),
        ),
        ("--actor-num-gpus-per-node 4 --colocate", Demand((4,), (1,) * 4, shared=True)),
        ("--actor-num-gpus-per-node 2 --colocate --rollout-num-gpus 4", Demand((2,), (1,) * 4, shared=True)),
        ("--actor-num-gpus-per-node 2 --loss-type sft_loss", Demand((2,), (), engines_per_node=8)),
        ("--actor-num-gpus-per-node 2 --rollout-num-gpus 0", Demand((2,), (), engines_per_node=8)),
    ],
)
def test_flags_become_pieces(words: str, expected: Demand) -> None:
    assert demand_of(parse_settings(words.split())) == expected


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ("--rollout-num-gpus 2", ("regular", "regular")),
        ("--rollout-num-gpus 2 --prefill-num-servers 0", ("regular", "regular")),
        (
            "--rollout-num-gpus 8 --rollout-num-gpus-per-engine 2 --prefill-num-servers 1",
            ("prefill", "decode", "decode", "decode"),
        ),
    ],
)
def test_engines_that_prefill_come_first_and_the_others_decode(words: str, kinds: tuple[str, ...]) -> None:
    assert engine_kinds(parse_settings(words.split())) == kinds


def test_prefill_engines_are_refused_by_name_with_what_they_need() -> None:
    asked = parse_settings(["--rollout-num-gpus", "2", "--prefill-num-servers", "1"])
    (sentence,) = [text for text in refused(asked) if "prefill" in text]
    assert sentence.startswith("--prefill-num-servers 1 is not built yet, allowed: left out, or 0. ")
    assert "by NIXL" in sentence
    assert not [text for text in refused(parse_settings(["--prefill-num-servers", "0"])) if "prefill" in text]
