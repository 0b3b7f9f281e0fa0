"""Layouts: how Hugging Face tensors become a Megatron parameter and its shards, and back.

Pure functions on tensors; the names are in `vime.models.weight_names`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vime.models.weight_names import WeightRule


@dataclass(frozen=True)
class AttentionShape:
    """Sizes that the qkv layout needs."""

    num_query_groups: int
    head_dim: int


def attention_shape(hf_config: Mapping[str, Any]) -> AttentionShape:
    heads = hf_config["num_attention_heads"]
    groups = hf_config.get("num_key_value_heads") or heads
    return AttentionShape(groups, hf_config.get("head_dim") or hf_config["hidden_size"] // heads)


def join(rule: WeightRule, parts: Sequence[torch.Tensor], shape: AttentionShape) -> torch.Tensor:
    """Hugging Face tensors in the order of `rule.hf_names` -> the full Megatron parameter."""
    if len(rule.hf_names) == 1:
        return parts[0]
    if rule.layout == "gate_up":
        return torch.cat(list(parts))
    rest = parts[0].shape[1:]
    grouped = [part.reshape(shape.num_query_groups, -1, *rest) for part in parts]
    return torch.cat(grouped, dim=1).reshape(-1, *rest)


def split(rule: WeightRule, full: torch.Tensor, shape: AttentionShape) -> list[torch.Tensor]:
    """The full Megatron parameter -> Hugging Face tensors in the order of `rule.hf_names`; inverse of `join`."""
    if len(rule.hf_names) == 1:
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
