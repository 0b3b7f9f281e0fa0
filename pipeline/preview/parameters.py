"""How many parameters a model has, from its Hugging Face `config.json` alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.backends.megatron_utils.hf_config import is_tied, num_experts
from vime.errors import ModelError


def count_parameters(hf_config: Mapping[str, Any]) -> int:
    """Parameters of a model of one of the families of `vime.models`, without heads for multi-token prediction.

    Raises:
        ModelError: a size is absent or not a number.
    """
    hidden, layers, vocabulary = (_size(hf_config, n) for n in ("hidden_size", "num_hidden_layers", "vocab_size"))
    attention = _latent_attention(hf_config, hidden) if _is_deepseek(hf_config) else _attention(hf_config, hidden)
    embeddings = vocabulary * hidden * (1 if is_tied(hf_config) else 2)
    routed, _, _ = routed_layers(hf_config)
    mlps = routed * _experts(hf_config, hidden) if routed else 0
    if layers > routed:
        mlps += (layers - routed) * 3 * hidden * _size(hf_config, "intermediate_size")
    return embeddings + layers * (attention + 2 * hidden) + mlps + hidden


def routed_layers(hf_config: Mapping[str, Any]) -> tuple[int, int, int]:
    """(layers with experts, experts that serve a token, experts); zeros for a dense model."""
    if not _is_deepseek(hf_config) and hf_config.get("model_type") != "qwen3_moe":
        return 0, 0, 0
    dense = int(hf_config.get("first_k_dense_replace") or 0)
    experts = _size(hf_config, "n_routed_experts") if _is_deepseek(hf_config) else num_experts(hf_config)
    return _size(hf_config, "num_hidden_layers") - dense, _size(hf_config, "num_experts_per_tok"), experts


def _attention(hf_config: Mapping[str, Any], hidden: int) -> int:
    heads, model_type = _size(hf_config, "num_attention_heads"), hf_config.get("model_type")
    groups = hf_config.get("num_key_value_heads") or heads
    head_dim = hf_config.get("head_dim") or hidden // heads
    projected = (heads + 2 * groups) * head_dim
    attention: int = hidden * projected + heads * head_dim * hidden
    if model_type in ("qwen3", "qwen3_moe"):  # norms of queries and keys
        attention += 2 * head_dim
    if model_type == "qwen2" or hf_config.get("attention_bias", False):
        attention += projected
    return attention


def _latent_attention(hf_config: Mapping[str, Any], hidden: int) -> int:
    """Queries, keys and values through a low rank each, with norms in between."""
    heads, plain, rotary, value = (
        _size(hf_config, n) for n in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    query_rank, rank = _size(hf_config, "q_lora_rank"), _size(hf_config, "kv_lora_rank")
    queries = hidden * query_rank + query_rank + query_rank * heads * (plain + rotary)
    keys_and_values = hidden * (rank + rotary) + rank + rank * heads * (plain + value)
    return queries + keys_and_values + heads * value * hidden


def _experts(hf_config: Mapping[str, Any], hidden: int) -> int:
    """Experts and router of one layer, with DeepSeek's shared experts and selection bias."""
    _, _, experts = routed_layers(hf_config)
    one = 3 * hidden * _size(hf_config, "moe_intermediate_size")
    shared = _size(hf_config, "n_shared_experts") * one + experts if _is_deepseek(hf_config) else 0
    return experts * one + experts * hidden + shared


def _is_deepseek(hf_config: Mapping[str, Any]) -> bool:
    return hf_config.get("model_type") == "deepseek_v3"


def _size(hf_config: Mapping[str, Any], name: str) -> int:
    value = hf_config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(
            f"config.json: {name} is {value!r}, allowed: a whole number above 0.", next_step="Restore the file."
        )
    return value
