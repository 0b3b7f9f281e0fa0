"""The documented example model: its `config.json` and its model arguments."""

from typing import Any

QWEN3_4B: dict[str, Any] = {
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip

MODEL_ARGS = """MODEL_ARGS=(
   --num-layers 36
   --hidden-size 2560
   --ffn-hidden-size 9728
   --swiglu
   --vocab-size 151936
   --disable-bias-linear
   # attn head
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --qk-layernorm
   # norm
   --normalization "RMSNorm"
   --norm-epsilon 1e-6
   # rope
   --use-rotary-position-embeddings
   --rotary-base 1000000
)
"""
"""As documented."""

MODEL_WORDS = [word.strip('"') for line in MODEL_ARGS.splitlines()[1:-1] if "#" not in line for word in line.split()]
"""The words that bash makes of it."""
