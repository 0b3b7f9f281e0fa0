"""Tiny checkpoints of every family of models, made from a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny_models import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, write_randomised

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
_LATENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_scaled": ("llama", {"tie_word_embeddings": False, "rope_parameters": _LLAMA3_ROPE}),
    "glm": ("glm", {"head_dim": 32, "tie_word_embeddings": False}),
    "glm_plain": ("glm", {"head_dim": 16, "partial_rotary_factor": 0.25, "attention_bias": False}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "deepseek_v3_yarn": ("deepseek_v3", {**_LATENT, "rope_parameters": _YARN_ROPE}),
}
"""By name: type and configuration of a model."""


def build_tiny_model(folder: Path, name: str, *, seed: int = 0, init_std: float = 0.08, **overrides: Any) -> Path:
    """Write the model of `FAMILIES` with a tokenizer as a float32 Hugging Face checkpoint; returns `folder`.

    `overrides` are fields of the configuration. Weights differ enough for numerical comparisons, biases and norms too.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = FAMILIES[name]
    config = AutoConfig.for_model(
        model_type,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        attention_dropout=0.0,
        dtype="float32",
        **{**_COMMON, "vocab_size": VOCAB_SIZE, **fields, **overrides},
    )
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config).eval()
    write_randomised(model, folder, seed, init_std)
    return folder


FURTHER_BESIDE = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
"""Of a layer for a further token, beside the usual tensors of a layer."""
FURTHER_COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
"""Tensors that such a layer has once more -> what they are copies of."""


def build_further_model(folder: Path, *, seed: int = 5, **overrides: Any) -> Path:
    """A tiny DeepSeek-V3 whose files have a layer for one further token, as its publisher writes it."""
    import torch
    from safetensors.torch import load_file, save_file

    build_tiny_model(folder, "deepseek_v3", seed=seed, num_nextn_predict_layers=1, **overrides)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(seed)
    hidden, num_layers = tensors["model.norm.weight"].numel(), int(_LATENT["num_hidden_layers"])
    last, layer = f"model.layers.{num_layers - 1}.", f"model.layers.{num_layers}."
    shapes = {name.removeprefix(last): value.shape for name, value in tensors.items() if name.startswith(last)}
    shapes |= {name: torch.Size([hidden]) for name in FURTHER_BESIDE}
    shapes["eh_proj.weight"] = torch.Size([hidden, 2 * hidden])
    for name, shape in sorted(shapes.items()):
        spread, centre = (0.1, 1.0) if "norm" in name else (0.08, 0.0)
        tensors[layer + name] = torch.randn(shape, generator=generator) * spread + centre
    tensors |= {layer + name: tensors[original].clone() for name, original in FURTHER_COPIES.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
