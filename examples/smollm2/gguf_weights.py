"""A GGUF file with a Llama inside, as a Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from vime.errors import ModelError

NEXT_STEP = "Use the version of the package that examples/smollm2/prepare.py names."

_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def config_of(reader: GGUFReader) -> LlamaConfig:
    """Shape and special tokens."""

    def value(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise ModelError(f"The GGUF file has no entry {key}.", next_step=NEXT_STEP)
        return field.contents()

    return LlamaConfig(
        vocab_size=value("llama.vocab_size"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        rms_norm_eps=round(value("llama.attention.layer_norm_rms_epsilon"), 10),  # it is stored as float32
        max_position_embeddings=value("llama.context_length"),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
    )


def weights_of(reader: GGUFReader, config: LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face name and float32 tensor of each weight."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if layer is None:
            yield _OUTSIDE[tensor.name], weight
        else:
            number, part = layer.groups()
            if part in heads:
                weight = halves_apart(weight, heads[part])
            yield f"model.layers.{number}.{_PARTS[part]}.weight", weight


def halves_apart(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows [heads x size, H] whose rotated pairs are neighbours, with the two of a pair half a head apart."""
    size = weight.shape[0] // num_heads
    return weight.view(num_heads, size // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def write_model(gguf: Path, folder: Path) -> None:
    """Write the checkpoint with its tokenizer. Raises `ModelError` where weights are missing."""
    reader = GGUFReader(gguf)
    config = config_of(reader)
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(dict(weights_of(reader, config)), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:  # the head is the embedding
        raise ModelError(f"{gguf}: missing {missing[:3]}, not expected {unexpected[:3]}.", next_step=NEXT_STEP)
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
