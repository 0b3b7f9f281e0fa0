"""Layouts of weights: hand-made examples, inverses, and refusals of unknown models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vime.backends.megatron_utils.hf_config import model_argv, read_hf_config
from vime.backends.megatron_utils.hf_mapping import AttentionShape, join, merge_shards, split, take_shard
from vime.errors import ModelError
from vime.models.weight_names import WeightRule, weight_rules

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 6,
    "max_position_embeddings": 64,
    "vocab_size": 10,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
}
SHAPE = AttentionShape(num_query_groups=2, head_dim=2)


def numbered(rows: int, start: int) -> torch.Tensor:
    return torch.arange(start, start + rows).float()[:, None].expand(rows, 3).contiguous()


def test_qkv_is_interleaved_by_query_group() -> None:
    rule = WeightRule("qkv", ("q", "k", "v"), "qkv", 0)
    full = join(rule, [numbered(8, 0), numbered(4, 100), numbered(4, 200)], SHAPE)
    assert full[:, 0].tolist() == [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]


def test_gate_and_up_are_cut_separately_by_tensor_parallelism() -> None:
    rule = WeightRule("fc1", ("gate", "up"), "gate_up", 0)
    full = join(rule, [numbered(4, 0), numbered(4, 100)], SHAPE)
    assert take_shard(rule, full, 1, 2)[:, 0].tolist() == [2, 3, 102, 103]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("change", [{}, {"tie_word_embeddings": False, "model_type": "qwen2"}, {"model_type": "glm"}])
def test_every_parameter_comes_back_from_its_shards_and_parts(change: dict[str, Any], size: int) -> None:
    rows = {"q": 8, "k": 4, "v": 4, "gate": 6, "up": 6, "gate_up": 12}
    for rule in weight_rules(CONFIG | change):
        parts = [
            torch.randn(rows.get(name.split(".")[-2].removesuffix("_proj"), 8), *([] if "bias" in name else [8]))
            for name in rule.hf_names
        ]
        full = join(rule, parts, SHAPE)
        shards = [take_shard(rule, full, rank, size) for rank in range(size)]
        back = split(rule, merge_shards(rule, shards), SHAPE)
        assert all(torch.equal(one, other) for one, other in zip(parts, back, strict=True)), rule


def test_a_fused_pair_is_one_tensor_that_is_cut_in_both_halves() -> None:
    fused = next(rule for rule in weight_rules(CONFIG | {"model_type": "glm"}) if rule.layout == "gate_up")
    assert fused.hf_names == ("model.layers.0.mlp.gate_up_proj.weight",)
    full = torch.cat([numbered(4, 0), numbered(4, 100)])
    assert take_shard(fused, join(fused, [full], SHAPE), 1, 2)[:, 0].tolist() == [2, 3, 102, 103]


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_member_without_a_bias_of_its_queries_has_no_rule_for_one(has_bias: bool) -> None:
    rules = weight_rules(CONFIG | {"model_type": "glm", "attention_bias": has_bias})
    assert any("bias" in rule.megatron_name for rule in rules) is has_bias


def test_tied_model_has_no_head_of_its_own() -> None:
    names = [name for rule in weight_rules(CONFIG) for name in rule.hf_names]
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names)) == 1 + 2 * 11 + 1


def test_shape_flags_follow_config() -> None:
    argv = model_argv(CONFIG)
    assert argv[argv.index("--num-query-groups") + 1] == "2"
    assert argv[argv.index("--kv-channels") + 1] == "2"
    assert argv[argv.index("--rotary-base") + 1] == "1000000"
    assert "--untie-embeddings-and-output-weights" not in argv


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', allowed: qwen2, qwen3, qwen3_moe, llama, glm, deepseek_v3"),
        ({"attention_bias": True}, "attention_bias is true, allowed: false"),
        ({"use_sliding_window": True}, "use_sliding_window is true, allowed: false"),
        ({"quantization_config": {"bits": 4}}, 'quantization_config is {"bits": 4}, allowed: false or left out'),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type is 'yarn', allowed: default"),
    ],
)
def test_models_that_cannot_be_built_are_refused_by_name(change: dict[str, Any], part: str) -> None:
    with pytest.raises(ModelError, match=part):
        model_argv(CONFIG | change)


def test_missing_and_broken_config_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{\n oops")
    with pytest.raises(ModelError, match=r"config\.json is no JSON that can be read: .* line 2"):
        read_hf_config(tmp_path)
    for damaged in (b"\xff", b"[" * 100_000):
        (tmp_path / "config.json").write_bytes(damaged)
        with pytest.raises(ModelError, match=r"config\.json is no JSON that can be read") as caught:
            read_hf_config(tmp_path)
        assert "another folder" in caught.value.next_step
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_hf_config(tmp_path) == CONFIG
