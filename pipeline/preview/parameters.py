"""How many parameters a model has, from its Hugging Face `config.json` alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.backends.megatron_utils.hf_config import is_tied, num_experts
from vime.errors import ModelError


def count_parameters(hf_config: Mapping[str, Any]) -> int:
    """Parameters of a Qwen3 or Qwen3-MoE model.

    Raises:
        ModelError: a size is absent or not a number.
    """
    hidden, layers, vocabulary = (_size(hf_config, n) for n in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads = _size(hf_config, "num_attention_heads")
    groups = hf_config.get("num_key_value_heads") or heads
    head_dim = hf_config.get("head_dim") or hidden // heads
    projected = (heads + 2 * groups) * head_dim
    attention = hidden * projected + heads * head_dim * hidden + 2 * head_dim
    if hf_config.get("attention_bias", False):
        attention += projected
    embeddings = vocabulary * hidden * (1 if is_tied(hf_config) else 2)
    return embeddings + layers * (attention + _mlp(hf_config, hidden) + 2 * hidden) + hidden


def routed_layers(hf_config: Mapping[str, Any]) -> tuple[int, int, int]:
    """(layers with experts, experts that serve a token, experts); zeros for a dense model."""
    if hf_config.get("model_type") != "qwen3_moe":
        return 0, 0, 0
    return _size(hf_config, "num_hidden_layers"), _size(hf_config, "num_experts_per_tok"), num_experts(hf_config)


def _mlp(hf_config: Mapping[str, Any], hidden: int) -> int:
    if hf_config.get("model_type") != "qwen3_moe":
        return 3 * hidden * _size(hf_config, "intermediate_size")
    experts = num_experts(hf_config)
    return experts * 3 * hidden * _size(hf_config, "moe_intermediate_size") + experts * hidden


def _size(hf_config: Mapping[str, Any], name: str) -> int:
    value = hf_config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(
            f"config.json: {name} is {value!r}, allowed: a whole number above 0.", next_step="Restore the file."
        )
    return value
