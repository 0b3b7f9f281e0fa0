"""Names and layouts: which Hugging Face tensors make up which Megatron parameter.

Pure functions on tensors; nothing here reads files or talks to other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from vime.backends.megatron_utils.hf_config import is_tied, num_experts

Layout = Literal["plain", "qkv", "gate_up"]
"""plain: one tensor. qkv: query, key and value interleaved by query group. gate_up: gate rows above up rows."""


@dataclass(frozen=True)
class WeightRule:
    """One full (unsharded) Megatron parameter and the Hugging Face tensors that hold the same numbers."""

    megatron_name: str
    """Name with the layer's number in the whole model."""
    hf_names: tuple[str, ...]
    layout: Layout = "plain"
    shard_dim: int | None = None
    """Dimension that tensor parallelism (of the experts, for an expert) cuts; None for a replicated parameter."""
    layer: int | None = None
    """Layer in the whole model; None outside the layers."""
    expert: int | None = None
    """Expert of the layer, whose parameters have a parallel layout of their own; None for all others."""


@dataclass(frozen=True)
class AttentionShape:
    """Sizes that the qkv layout needs."""

    num_query_groups: int
    head_dim: int


def attention_shape(hf_config: Mapping[str, Any]) -> AttentionShape:
    heads = hf_config["num_attention_heads"]
    groups = hf_config.get("num_key_value_heads") or heads
    return AttentionShape(groups, hf_config.get("head_dim") or hf_config["hidden_size"] // heads)


def weight_rules(hf_config: Mapping[str, Any]) -> list[WeightRule]:
    """Rules of the whole model, in the order in which weights are published: embedding, layers, norm, head."""
    rules = [WeightRule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), shard_dim=0)]
    for layer in range(hf_config["num_hidden_layers"]):
        rules += _layer_rules(hf_config, layer)
    rules.append(WeightRule("decoder.final_layernorm.weight", ("model.norm.weight",)))
    if not is_tied(hf_config):
        rules.append(WeightRule("output_layer.weight", ("lm_head.weight",), shard_dim=0))
    return rules


def _layer_rules(hf_config: Mapping[str, Any], layer: int) -> list[WeightRule]:
    megatron, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."

    def rule(
        name: str,
        *hf_names: str,
        layout: Layout = "plain",
        shard_dim: int | None = None,
        expert: int | None = None,
    ) -> WeightRule:
        return WeightRule(megatron + name, tuple(hf + part for part in hf_names), layout, shard_dim, layer, expert)

    qkv = [f"self_attn.{part}_proj" for part in "qkv"]
    rules = [
        rule("input_layernorm.weight", "input_layernorm.weight"),
        rule("self_attention.linear_qkv.weight", *(f"{part}.weight" for part in qkv), layout="qkv", shard_dim=0),
    ]
    if hf_config.get("attention_bias", False):
        biases = [f"{part}.bias" for part in qkv]
        rules.append(rule("self_attention.linear_qkv.bias", *biases, layout="qkv", shard_dim=0))
    rules += [
        rule("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
        rule("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
        rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight", shard_dim=1),
        rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    ]
    if hf_config["model_type"] != "qwen3_moe":
        return rules + _mlp_rules(rule, "mlp.", "mlp.")
    rules.append(rule("mlp.router.weight", "mlp.gate.weight"))
    for expert in range(num_experts(hf_config)):
        rules += _mlp_rules(rule, f"mlp.experts.local_experts.{expert}.", f"mlp.experts.{expert}.", expert)
    return rules


def _mlp_rules(rule: Any, megatron: str, hf: str, expert: int | None = None) -> list[WeightRule]:
    return [
        rule(
            megatron + "linear_fc1.weight",
            hf + "gate_proj.weight",
            hf + "up_proj.weight",
            layout="gate_up",
            shard_dim=0,
            expert=expert,
        ),
        rule(megatron + "linear_fc2.weight", hf + "down_proj.weight", shard_dim=1, expert=expert),
    ]


def join(rule: WeightRule, parts: Sequence[torch.Tensor], shape: AttentionShape) -> torch.Tensor:
    """Hugging Face tensors in the order of `rule.hf_names` -> the full Megatron parameter."""
    if rule.layout == "plain":
        return parts[0]
    if rule.layout == "gate_up":
        return torch.cat(list(parts))
    rest = parts[0].shape[1:]
    grouped = [part.reshape(shape.num_query_groups, -1, *rest) for part in parts]
    return torch.cat(grouped, dim=1).reshape(-1, *rest)


def split(rule: WeightRule, full: torch.Tensor, shape: AttentionShape) -> list[torch.Tensor]:
    """The full Megatron parameter -> Hugging Face tensors in the order of `rule.hf_names`; inverse of `join`."""
    if rule.layout == "plain":
        return [full]
    if rule.layout == "gate_up":
        return list(full.chunk(2))
    rest = full.shape[1:]
    grouped = full.reshape(shape.num_query_groups, -1, *rest)
    queries = grouped.size(1) - 2 * shape.head_dim
    parts = torch.split(grouped, [queries, shape.head_dim, shape.head_dim], dim=1)
    return [part.reshape(-1, *rest) for part in parts]


def take_shard(rule: WeightRule, full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """This tensor-parallel rank's part of a full parameter; a gate-up pair is cut in both halves."""
    if size == 1 or rule.shard_dim is None:
        return full
    if rule.layout == "gate_up":
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full.chunk(size, dim=rule.shard_dim)[rank]


def merge_shards(rule: WeightRule, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Inverse of `take_shard` over all ranks."""
    if len(shards) == 1 or rule.shard_dim is None:
        return shards[0]
    if rule.layout == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(list(shards), dim=rule.shard_dim)


def pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Append zero rows up to `rows` (a vocabulary padded for tensor parallelism)."""
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.size(0), *tensor.shape[1:])])
