"""The examples of a mixture of experts (`moe_r3`) and of a real language model (`smollm2`), each for a short run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.moe_r3 import prepare as moe
from examples.moe_r3.reward import digit_share
from examples.smollm2.gguf_weights import halves_apart
from examples.smollm2.prepare import prompts
from examples.smollm2.reward import right_sum
from recovery.audit import audit_run
from tests.examples.run_script import settings_of, steps_of
from vime.errors import SettingsError
from vime.settings.import_paths import load_function
from vime.settings.validate import validate
from vime.utils.types import Sample

CONFIGS: dict[str, dict[str, Any]] = {
    "moe_r3": {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "smollm2": {"model_type": "llama"},
}
BF16_MEAN = 2e-2
"""Between an engine of SmolLM2 in bfloat16, with strict parity, and a float32 trainer."""
SHORT = ("--num-rollout", "2", "--rollout-batch-size", "4")


def audited(run: Path) -> tuple[list[Any], list[Any], int]:
    report = audit_run(run)
    return report.lost, report.trained_twice, report.trained


@pytest.mark.parametrize(("name", "config"), CONFIGS.items())
def test_the_command_line_passes_every_check(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    shape = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}
    settings = settings_of(tmp_path, name, "example/model", {**config, **shape})
    validate(settings)
    assert load_function("--custom-rm-path", str(settings.rollout.custom_rm_path))
    assert settings.objective.use_rollout_routing_replay == (name == "moe_r3")


def test_the_mixtures_prompts_and_weights_are_a_function_of_the_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        moe.prepare(tmp_path / name, seed)
    contents = [
        [(tmp_path / name / file).read_bytes() for file in ("prompts.jsonl", "model/model.safetensors")]
        for name in ("a", "b", "c")
    ]
    assert contents[0] == contents[1]
    assert all(one != other for one, other in zip(contents[0], contents[2], strict=True))
    assert json.loads((tmp_path / "a" / "model" / "config.json").read_text())["model_type"] == "qwen3_moe"
    with pytest.raises(SettingsError, match="exists"):
        moe.prepare(tmp_path / "a")


@pytest.mark.parametrize(
    ("reward", "response", "label", "value"),
    [
        (digit_share, "1a2b", None, 0.5),
        (digit_share, "", None, 0.0),
        (right_sum, "3 + 4 is 7.", "7", 1.0),
        (right_sum, "7, no: 8", "7", 0.0),
        (right_sum, "seven", "7", 0.0),
    ],
)
async def test_rewards(reward: Callable[..., Any], response: str, label: str | None, value: float) -> None:
    assert await reward(None, Sample(response=response, response_length=len(response), label=label)) == value


def test_prompts_are_chats_with_their_sums() -> None:
    first, *_, last = prompts(400)
    assert first == {"prompt": [{"role": "user", "content": "What is 1 + 1?"}], "label": "2"}
    assert last == {"prompt": [{"role": "user", "content": "What is 20 + 20?"}], "label": "40"}


def test_the_two_rows_of_a_rotated_pair_come_to_lie_half_a_head_apart() -> None:
    heads = [["a0", "a1", "b0", "b1"], ["c0", "c1", "d0", "d1"]]
    rows = {name: number for number, name in enumerate(name for head in heads for name in head)}
    weight = torch.arange(8.0)[:, None]
    wanted = ["a0", "b0", "a1", "b1", "c0", "d0", "c1", "d1"]
    assert halves_apart(weight, 2)[:, 0].tolist() == [rows[name] for name in wanted]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.multiproc
@pytest.mark.timeout(600)
def test_the_mixture_is_trained_on_the_experts_of_its_sampler(tmp_path: Path) -> None:
    steps = steps_of(tmp_path, "moe_r3", *SHORT)
    assert [step["train"]["routing_replay_fraction"] for step in steps] == [1.0, 1.0]
    assert [step["alarms"] for step in steps] == [[], []]
    assert all(step["reward_mean"] > 0.05 for step in steps)
    assert audited(tmp_path / "run") == ([], [], 8)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.multiproc
@pytest.mark.timeout(900)
def test_smollm2s_engine_in_bf16_and_its_trainer_differ_by_the_rounding_alone(tmp_path: Path) -> None:
    (step,) = steps_of(tmp_path, "smollm2", "--num-rollout", "1")
    assert step["staleness_max"] == 0, "sampled from the weights that score it"
    assert 1e-4 < step["train"]["train_rollout_logprob_abs_diff"] <= BF16_MEAN
    assert 0 < step["reward_mean"] < 1, "a model that answers sums, some of them wrongly"
    assert audited(tmp_path / "run") == ([], [], 8)
