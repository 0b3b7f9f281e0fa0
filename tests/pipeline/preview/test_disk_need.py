"""Bytes are those of real files: of a model's weights, and of an encoded group."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.preview.disk_need import disk_need
from pipeline.preview.parameters import count_parameters
from storage.columns import encode_group
from tests.pipeline.preview.planned import QWEN3_4B, settings_of
from tests.support.tiny_models import build_tiny_qwen3
from vime.errors import ModelError
from vime.utils.types import Sample


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_experts", [None, 4])
def test_parameters_are_those_of_the_checkpoint(tmp_path: Path, tied: bool, num_experts: int | None) -> None:
    from safetensors import safe_open

    build_tiny_qwen3(tmp_path, tied=tied, num_experts=num_experts)
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        stored = sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118 - not a mapping
    assert count_parameters(json.loads((tmp_path / "config.json").read_text())) == stored


@pytest.mark.parametrize("model_type", ["qwen2", "llama", "glm", "deepseek_v3"])
def test_other_families_have_the_parameters_that_transformers_builds(model_type: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type, hidden_size=32, num_hidden_layers=3, vocab_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=48, tie_word_embeddings=False, n_routed_experts=8, n_shared_experts=1,
        num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1, q_lora_rank=12, kv_lora_rank=8,
        qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, n_group=2, topk_group=1, pad_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert count_parameters(config.to_dict()) == sum(value.numel() for value in model.state_dict().values())


def test_qwen3_4b_has_four_billion_parameters_and_their_float32_states(tmp_path: Path) -> None:
    need = disk_need(settings_of(tmp_path), QWEN3_4B)
    assert need.parameters == 4_022_468_096
    assert need.checkpoint_bytes == 12 * need.parameters
    assert need.num_commits == 4
    assert disk_need(settings_of(tmp_path, "--bf16"), QWEN3_4B).checkpoint_bytes == 14 * need.parameters
    assert disk_need(settings_of(tmp_path, "--no-save-optim"), QWEN3_4B).checkpoint_bytes == 4 * need.parameters


def test_a_critic_is_a_second_model_in_each_checkpoint(tmp_path: Path) -> None:
    need = disk_need(settings_of(tmp_path, "--advantage-estimator", "ppo"), QWEN3_4B)
    assert need.parameters == 4_022_468_096
    assert need.checkpoint_bytes == 12 * (2 * need.parameters + 2560 + 1)


def test_a_released_trainer_commits_every_batch(tmp_path: Path) -> None:
    assert disk_need(settings_of(tmp_path), QWEN3_4B).num_commits == 4
    released = settings_of(tmp_path, "--release-train")
    assert disk_need(released, QWEN3_4B).num_commits == released.data.num_rollout


MOE = {
    **QWEN3_4B, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip


@pytest.mark.parametrize("sc_dtype", ["float16", "float32"])
def test_columns_are_those_of_an_encoded_sample(tmp_path: Path, sc_dtype: str) -> None:
    flags = ("--use-rollout-routing-replay", "--use-score-centering", "--rollout-queue-sc-dtype", sc_dtype)
    need = disk_need(settings_of(tmp_path, "--rollout-max-context-len", "1500", *flags), MOE)
    total, response = 1500, 1000
    assert (need.longest_sequence, need.longest_response) == (total, response)
    sample = Sample(
        group_index=0, index=0, tokens=[1] * total, response_length=response, reward=1.0,
        rollout_log_probs=[-1.0] * response, status=Sample.Status.COMPLETED,
        rollout_routed_experts=np.zeros((total - 1, 36, 8), np.uint8),
        rollout_topk_token_ids=np.zeros((response, 128), np.int32),
        rollout_topk_log_probs=np.zeros((response, 128), np.float32),
    )  # fmt: skip
    encoded = encode_group([sample], sc_dtype=sc_dtype, num_experts=128)
    stored = {name: column.nbytes for name, column in encoded.columns.items()}
    one_row = 36 * 8  # the last token has no routes
    stored["routes"] += one_row
    planned = {column.name: column.bytes_of(total, response) for column in need.columns}
    assert planned == {name: size for name, size in stored.items() if name != "fields"}
    assert need.sample_bytes >= sum(stored.values()) + len(encoded.header)
    assert need.rollout_bytes == 256 * need.sample_bytes


def test_routes_and_sampler_heads_count_only_when_asked_for(tmp_path: Path) -> None:
    plain = disk_need(settings_of(tmp_path, "--rollout-max-context-len", "1500"), MOE)
    assert [column.name for column in plain.columns] == ["tokens", "loss_mask", "sampler_log_probs"]


def test_the_least_limit_bounds_the_sequence(tmp_path: Path) -> None:
    def longest(*more: str) -> int | None:
        return disk_need(settings_of(tmp_path, *more), QWEN3_4B).longest_sequence

    assert longest() == 40960
    assert longest("--vllm-max-model-len", "2048") == 2048
    assert longest("--rollout-max-prompt-len", "24") == 1024
    assert longest("--vllm-max-model-len=64", "--rollout-max-context-len", "100") == 64


def test_config_without_a_size_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="hidden_size is None"):
        disk_need(settings_of(tmp_path), {"model_type": "qwen3"})
