"""Layers that predict further tokens learn what the formulas say, under any layout, and keep their place in files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.vime.backends.megatron_utils.tiny_batches import make_sequences, pack
from vime.backends.megatron_utils.further_targets import further_targets, shifted_tokens
from vime.models.weight_names import num_further_layers, weight_rules

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

SPLITS = ("tensor", "pipeline", "experts", "zigzag", "recompute")


@pytest.fixture(scope="module")
def one_rank(run_world: Any) -> dict[str, Any]:
    return run_world(1, ["reference", "saved"], "further_worker.py")


@pytest.fixture(scope="module")
def two_ranks(run_world: Any) -> dict[str, Any]:
    return run_world(2, list(SPLITS), "further_worker.py", 500)


def test_loss_and_gradients_of_a_further_token_are_those_of_the_dense_reference(one_rank: dict[str, Any]) -> None:
    found = one_rank["reference"]
    assert found["num_of_the_layer"] > 30
    assert found["smallest_of_the_layer"] > 1e-6, "every weight of the layer learns"
    assert found["metrics"] < 1e-5, "the policy loss is as without it"
    assert found["mtp_loss"] < 1e-5
    assert found["gradients"] < 1e-5
    assert found["reaches_the_model"] > 1e-4


def test_with_detached_heads_only_the_layer_itself_learns_from_further_tokens(one_rank: dict[str, Any]) -> None:
    assert one_rank["reference"]["detached"] < 1e-5


def test_its_weights_come_back_bit_equal_with_their_copies_and_engines_do_not_get_them(
    one_rank: dict[str, Any],
) -> None:
    found = one_rank["reference"]
    assert found["bit_equal"]
    assert found["copies"]
    assert not found["published"]


def test_a_checkpoint_holds_the_layer_and_can_be_read_as_weights_alone(one_rank: dict[str, Any]) -> None:
    assert one_rank["saved"] == {"resumed": 0.0, "read": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_further_tokens_are_learned_on_two_ranks_as_on_one(two_ranks: dict[str, Any], split: str) -> None:
    assert two_ranks[split]["weights"] < 1e-5
    assert two_ranks[split]["metrics"] < 3e-5


def test_each_depth_is_told_the_tokens_so_far_behind_and_what_they_predict() -> None:
    microbatch = pack(make_sequences(0), [0, 1, 3])
    sequences = np.split(microbatch.tokens, microbatch.cu_seqlens[1:-1])
    starts, lengths = microbatch.cu_seqlens[:-1].tolist(), microbatch.response_lengths.tolist()
    responses = [
        (start, place, int(item[place]))
        for start, item, length in zip(starts, sequences, lengths, strict=True)
        for place in range(len(item) - length, len(item))
    ]
    predictors = np.array([start + place - 1 for start, place, _ in responses])
    everywhere = np.arange(len(microbatch.tokens))
    for depth in (1, 2):
        shifted = np.concatenate([np.append(item[depth:], [0] * depth)[: len(item)] for item in sequences])
        assert shifted_tokens(microbatch, everywhere, len(everywhere), depth).tolist() == shifted.tolist()
        expected = [(start + place - 1 - depth, token) for start, place, token in responses if place - 1 - depth >= 0]
        found = further_targets(microbatch, predictors, everywhere, everywhere, depth, torch.device("cpu"))
        assert list(zip(found.rows.tolist(), found.targets.tolist(), strict=True)) == expected
        assert int(found.lengths.sum()) == len(expected) == len(found.loss_mask)


def test_only_families_whose_names_are_known_have_such_layers() -> None:
    assert num_further_layers({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}) == 1
    assert num_further_layers({"model_type": "deepseek_v3"}) == 0
    assert num_further_layers({"model_type": "qwen3", "num_nextn_predict_layers": 1}) == 0


def test_its_parameters_are_named_after_their_depth_and_its_tensors_after_the_last_layer() -> None:
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "n_routed_experts": 2,
    }
    rules = {rule.megatron_name: rule for rule in weight_rules(config, 1) if not rule.is_copy}
    names = {
        "mtp.layers.0.eh_proj.weight": "model.layers.2.eh_proj.weight",
        "mtp.layers.0.final_layernorm.weight": "model.layers.2.shared_head.norm.weight",
        "mtp.layers.0.mtp_model_layer.mlp.router.weight": "model.layers.2.mlp.gate.weight",
        "mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.1.linear_fc2.weight": (
            "model.layers.2.mlp.experts.1.down_proj.weight"
        ),
    }
    assert {name: rules[name].hf_names for name in names} == {name: (hf,) for name, hf in names.items()}
    assert {rules[name].layer_prefix for name in names} == {"mtp.layers.0."}
    copies = [rule.hf_names[0] for rule in weight_rules(config, 1) if rule.is_copy]
    assert copies == ["model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"]
