"""From a Hugging Face `config.json` to Megatron's shape flags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime.errors import ModelError

ALLOWED_MODEL_TYPES = ("qwen3", "qwen3_moe")


def read_hf_config(checkpoint: Path) -> dict[str, Any]:
    """Return the parsed `config.json` of a checkpoint folder; `ModelError` when it is absent or not JSON."""
    path = checkpoint / "config.json"
    try:
        parsed = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} does not exist.", next_step="Point --hf-checkpoint at a Hugging Face model folder."
        ) from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}:{error.lineno} is not JSON: {error.msg}.") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} holds a {type(parsed).__name__}, allowed: an object.")
    return parsed


def is_tied(hf_config: Mapping[str, Any]) -> bool:
    """Whether the output head shares the embedding matrix."""
    return bool(hf_config.get("tie_word_embeddings", False))


def num_experts(hf_config: Mapping[str, Any]) -> int:
    """Experts of a layer; transformers writes the number under either of two names."""
    return _integer(hf_config, "num_local_experts" if "num_local_experts" in hf_config else "num_experts")


def model_argv(hf_config: Mapping[str, Any]) -> list[str]:
    """Megatron flags that give a model the shape in `hf_config`.

    Raises `ModelError` naming the model type and the allowed ones, or the field that can't be represented.
    """
    model_type = hf_config.get("model_type")
    if model_type not in ALLOWED_MODEL_TYPES:
        raise ModelError(
            f"config.json: model_type is {model_type!r}, allowed: {', '.join(ALLOWED_MODEL_TYPES)}.",
            next_step="Choose a checkpoint of an allowed type.",
        )
    hidden, heads = _integer(hf_config, "hidden_size"), _integer(hf_config, "num_attention_heads")
    positions = str(_integer(hf_config, "max_position_embeddings"))
    argv = ["--num-layers", str(_integer(hf_config, "num_hidden_layers"))]
    argv += ["--hidden-size", str(hidden), "--ffn-hidden-size", str(_integer(hf_config, "intermediate_size"))]
    argv += ["--num-attention-heads", str(heads), "--group-query-attention"]
    argv += ["--num-query-groups", str(hf_config.get("num_key_value_heads") or heads)]
    argv += ["--kv-channels", str(hf_config.get("head_dim") or hidden // heads)]
    argv += ["--max-position-embeddings", positions, "--seq-length", positions]
    argv += ["--vocab-size", str(_integer(hf_config, "vocab_size"))]
    argv += ["--normalization", "RMSNorm", "--norm-epsilon", repr(float(hf_config.get("rms_norm_eps", 1e-6)))]
    argv += ["--qk-layernorm", "--swiglu", "--disable-bias-linear"]
    argv += ["--position-embedding-type", "rope", "--rotary-base", str(_rotary_base(hf_config))]
    if hf_config.get("attention_bias", False):
        argv.append("--add-qkv-bias")
    if not is_tied(hf_config):
        argv.append("--untie-embeddings-and-output-weights")
    return argv + (_expert_argv(hf_config) if model_type == "qwen3_moe" else [])


def _expert_argv(hf_config: Mapping[str, Any]) -> list[str]:
    if hf_config.get("decoder_sparse_step", 1) != 1 or hf_config.get("mlp_only_layers"):
        raise ModelError("config.json: dense layers between expert layers, allowed: experts in every layer.")
    if not hf_config.get("norm_topk_prob", True):
        raise ModelError("config.json: norm_topk_prob is false, allowed: true.")
    argv = ["--num-experts", str(num_experts(hf_config))]
    argv += ["--moe-router-topk", str(_integer(hf_config, "num_experts_per_tok"))]
    argv += ["--moe-ffn-hidden-size", str(_integer(hf_config, "moe_intermediate_size"))]
    argv += ["--moe-token-dispatcher-type", "alltoall", "--moe-router-load-balancing-type", "none"]
    return [*argv, "--moe-aux-loss-coeff", "0", "--moe-router-dtype", "fp32"]


def _integer(hf_config: Mapping[str, Any], name: str) -> int:
    value = hf_config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {name} is {value!r}, allowed: a whole number above 0.")
    return value


def _rotary_base(hf_config: Mapping[str, Any]) -> int:
    """Base of the rotary embedding; transformers 5 keeps it in `rope_parameters`, earlier ones at the top."""
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelError(f"config.json: rope type is {kind!r}, allowed: default.")
    base = float(rope.get("rope_theta", hf_config.get("rope_theta", 10_000.0)))
    if base != int(base):
        raise ModelError(f"config.json: rope_theta is {base}, allowed: a whole number.")
    return int(base)
