"""Flags that say how samples become microbatches."""

import json
from pathlib import Path

import pytest

from pipeline.packing import PackingSettings
from pipeline.packing_settings import packing_settings
from vime.settings.resolve import resolve


def packing(*words: str) -> PackingSettings:
    return packing_settings(resolve(["--num-rollout", "6", *words]).settings, 4)


def test_microbatches_have_a_fixed_size_unless_asked_otherwise() -> None:
    assert packing("--micro-batch-size", "3", "--max-tokens-per-gpu", "9") == PackingSettings(
        num_ranks=4, micro_batch_size=3
    )


def test_token_limit_of_a_microbatch_is_that_of_all_its_context_parallel_ranks() -> None:
    found = packing("--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096", "--context-parallel-size", "2")
    assert (found.max_tokens, found.length_multiple) == (8192, 4)


@pytest.mark.parametrize("flag", ["--balance-data", "--balance-by-flops"])
def test_either_flag_balances_and_one_of_them_balances_work(flag: str, tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 9,
        "vocab_size": 9,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    dynamic = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096")
    found = packing("--hf-checkpoint", str(tmp_path), *dynamic, flag)
    assert found.balance
    assert (found.linear_work is not None) == (flag == "--balance-by-flops")


def test_an_interleaved_pipeline_gets_a_multiple_of_its_stages() -> None:
    pipeline = ("--pipeline-model-parallel-size", "2")
    assert packing(*pipeline).count_multiple == 1
    assert packing(*pipeline, "--num-layers-per-virtual-pipeline-stage", "1").count_multiple == 2
