"""Megatron's checkpoints as other programs lay them out: ranks, names of Transformer Engine, and what doesn't fit."""

from __future__ import annotations

import itertools
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from vime.backends.megatron_utils.hf_mapping import take_shard
from vime.backends.megatron_utils.megatron_reader import TorchDistWeights, TorchWeights
from vime.backends.megatron_utils.open_weights import open_weights
from vime.backends.megatron_utils.torch_dist_files import TorchDistWriter
from vime.backends.megatron_utils.weight_source import MODEL_FILE, WeightSource
from vime.errors import ModelError, RestoreError
from vime.models.weight_names import WeightRule, weight_rules

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 9,
    "hidden_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "num_experts": 4,
}
RULES = weight_rules(CONFIG)
FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def shape_of(name: str) -> tuple[int, ...]:
    last = name.rsplit(".", 2)[1]
    sizes = {"word_embeddings": (10, 4), "output_layer": (10, 4), "linear_qkv": (12, 4), "linear_proj": (4, 4)}
    sizes |= {"linear_fc1": (6, 4), "linear_fc2": (4, 3 * 2), "router": (4, 4)}
    return sizes.get(last, (2,) if last in ("q_layernorm", "k_layernorm") else (4,))


FULL = {rule.megatron_name: torch.randn(shape_of(rule.megatron_name)) for rule in RULES}
"""Whole parameters; the vocabulary is padded to 10 rows."""


def args(**sizes: int) -> Namespace:
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    given = dict.fromkeys(names, 1) | {"expert_tensor_parallel_size": None, "num_experts": 4} | sizes
    return Namespace(**given)


def save_ranks(folder: Path, **sizes: int) -> Path:
    """Rank files under tensor, pipeline and expert parallelism; a stage holds one layer of two."""
    given = args(**sizes)
    torch.serialization.add_safe_globals([Namespace])
    tensors, stages = given.tensor_model_parallel_size, given.pipeline_model_parallel_size
    experts = given.expert_model_parallel_size
    for tensor, stage, expert in itertools.product(range(tensors), range(stages), range(experts)):
        state = {
            local_name(rule, stages, experts): take_shard(rule, FULL[rule.megatron_name], tensor, tensors)
            for rule in RULES
            if is_on(rule, stage, stages) and (rule.expert is None or rule.expert // (4 // experts) == expert)
        }
        parts = [
            f"{tensor:02d}",
            *([f"{stage:03d}"] if stages > 1 else []),
            *([f"{expert:03d}"] if experts > 1 else []),
        ]
        save_rank(folder / "_".join(["mp_rank", *parts]), state, given)
    return folder


def save_rank(folder: Path, state: dict[str, torch.Tensor], given: Namespace) -> None:
    folder.mkdir(parents=True)
    torch.save({"model": {name: part.clone() for name, part in state.items()}, "args": given}, folder / MODEL_FILE)


def is_on(rule: WeightRule, stage: int, stages: int) -> bool:
    if rule.layer is not None:
        return stages == 1 or rule.layer == stage
    return stage == (0 if rule.megatron_name.startswith("embedding") else stages - 1)


def local_name(rule: WeightRule, stages: int, experts: int) -> str:
    """Layers and experts are numbered from 0 on each rank."""
    name = rule.megatron_name
    if rule.expert is not None:
        name = re.sub(r"(local_experts\.)\d+", rf"\g<1>{rule.expert % (4 // experts)}", name)
    return re.sub(r"(layers\.)\d+", r"\g<1>0", name) if stages > 1 else name


def assert_whole(reader: TorchWeights | TorchDistWeights) -> None:
    with reader:
        reader.check_names(RULES)
        for rule in RULES:
            wanted = FULL[rule.megatron_name]
            assert reader.shape(rule) == tuple(wanted.shape)
            assert torch.equal(reader.read(rule), wanted[:9] if rule.is_vocabulary else wanted), rule.megatron_name


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tensor_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
        {"expert_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
    ],
)
def test_rank_files_of_any_layout_give_whole_parameters(tmp_path: Path, sizes: dict[str, int]) -> None:
    assert_whole(TorchWeights(save_ranks(tmp_path, **sizes), CONFIG))


def test_an_absent_rank_is_said(tmp_path: Path) -> None:
    folder = save_ranks(tmp_path, tensor_model_parallel_size=2)
    shutil.rmtree(folder / "mp_rank_01")
    with pytest.raises(ModelError, match=r"has the files of 1 rank, not all of .* 2 x 1 x 1"):
        TorchWeights(folder, CONFIG)


def test_experts_cut_in_another_number_than_the_rest_are_refused(tmp_path: Path) -> None:
    save_rank(tmp_path / "mp_rank_00", {}, args(expert_tensor_parallel_size=2, tensor_model_parallel_size=4))
    with pytest.raises(ModelError, match="--expert-tensor-parallel-size 2 of --tensor-model-parallel-size 4"):
        TorchWeights(tmp_path, CONFIG)


def save_stacked(folder: Path, *, layers: int = 2, fused: bool = False) -> Path:
    writer = TorchDistWriter(folder)
    for rule in RULES:
        full = FULL[rule.megatron_name]
        if rule.layer is None:
            writer.add_part(rule.megatron_name, full.shape, [0] * full.dim(), full)
            continue
        name = re.sub(r"^decoder\.layers\.\d+\.", "", rule.megatron_name)
        name = FUSED.get(name, name) if fused else name
        index = [rule.layer] if rule.expert is None else [rule.layer, rule.expert]
        key = "decoder.layers." + re.sub(r"local_experts\.\d+\.", "experts.", name)
        sizes = [layers] if rule.expert is None else [layers, 4]
        part = full.reshape([1] * len(index) + list(full.shape))
        writer.add_part(key, [*sizes, *full.shape], [*index, *[0] * full.dim()], part)
    writer.add_part("optimizer.state.exp_avg", (1,), (0,), torch.zeros(1))
    writer.finish()
    return folder


@pytest.mark.parametrize("fused", [False, True])
def test_layers_in_one_tensor_are_taken_apart_whatever_the_norms_are_called(tmp_path: Path, fused: bool) -> None:
    assert_whole(TorchDistWeights(save_stacked(tmp_path, fused=fused), CONFIG))


def test_more_layers_than_the_model_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds 3 layers or experts, allowed: 2"):
        TorchDistWeights(save_stacked(tmp_path, layers=3), CONFIG).check_names(RULES)


def test_names_that_are_missing_or_unknown_are_listed(tmp_path: Path) -> None:
    config = CONFIG | {"model_type": "qwen3", "intermediate_size": 3}
    with pytest.raises(
        ModelError, match=r"missing weights: decoder\.layers\.0\.mlp\.linear_fc1\.weight.*mlp\.router\.weight"
    ):
        TorchDistWeights(save_stacked(tmp_path), config).check_names(weight_rules(config))


def test_each_format_is_told_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    assert isinstance(open_weights(WeightSource("F", save_stacked(tmp_path / "dist")), CONFIG), TorchDistWeights)
    with open_weights(WeightSource("F", save_ranks(tmp_path / "ranks")), CONFIG) as reader:
        assert isinstance(reader, TorchWeights)
    (tmp_path / "none" / "release").mkdir(parents=True)
    (tmp_path / "none" / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(RestoreError, match=r"release holds neither \.metadata \(torch_dist\) nor mp_rank"):
        open_weights(WeightSource("F", tmp_path / "none"), CONFIG)
