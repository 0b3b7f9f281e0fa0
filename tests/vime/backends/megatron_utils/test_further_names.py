"""Layers for further tokens in files: what can't be converted is refused by name, never left out in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vime.backends.megatron_utils.weight_reader import HuggingFaceReader, check_names
from vime.errors import ModelError
from vime.models.weight_names import num_further_layers, weight_rules

CONFIG: dict[str, Any] = {
    "vocab_size": 4,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "n_routed_experts": 1,
    "num_nextn_predict_layers": 1,
}


def refuse(folder: Path, model_type: str, *more: str, **entries: Any) -> None:
    """What a conversion does with a model whose files hold `more` beside the model's own weights."""
    config = CONFIG | {"model_type": model_type} | entries
    rules = weight_rules(config, num_further_layers(config))
    names = {name for rule in weight_rules(config) for name in rule.hf_names}
    save_file({name: torch.zeros(1) for name in (*names, *more)}, folder / "model.safetensors")
    with HuggingFaceReader(folder, config) as reader:
        reader.refuse_further_layers(rules)


@pytest.mark.parametrize(
    ("model_type", "name", "entries"),
    [
        ("qwen2", "model.layers.1.eh_proj.weight", {}),
        ("glm", "model.layers.1.mlp.down_proj.weight", {}),
        ("deepseek_v3", "model.layers.2.eh_proj.weight", {}),
        ("deepseek_v3", "model.layers.1.eh_proj.weight", {"tie_word_embeddings": True}),
    ],
    ids=["another family", "a further one", "more than config.json says", "a head that is the embedding"],
)
def test_a_layer_that_has_no_names_in_megatron_is_refused(
    tmp_path: Path, model_type: str, name: str, entries: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match=r"layers for further tokens .* can't be converted") as caught:
        refuse(tmp_path, model_type, name, **entries)
    assert name in caught.value.message
    assert "model_type deepseek_v3" in caught.value.message
    assert "a copy of the checkpoint without these weights" in caught.value.next_step


def test_a_layer_that_has_them_is_let_through(tmp_path: Path) -> None:
    refuse(tmp_path, "deepseek_v3", "model.layers.1.eh_proj.weight", "model.layers.1.self_attn.rotary_emb.inv_freq")
    refuse(tmp_path, "qwen2")


@pytest.mark.parametrize("name", ["model.mtp_layers.0.input_proj.weight", "mtp.fc.weight", "mtp.layers.0.enorm.weight"])
def test_names_that_only_such_layers_have_are_told_apart_from_a_wrong_config(name: str) -> None:
    with pytest.raises(ModelError, match="missing weights: none; unexpected weights: ") as caught:
        check_names(Path("model"), ["lm_head.weight"], ["lm_head.weight", name])
    assert "without its layers for further tokens" in caught.value.next_step
    with pytest.raises(ModelError) as caught:
        check_names(Path("model"), ["lm_head.weight"], [name])
    assert "config.json belongs" in caught.value.next_step
