"""Names of weights: the one table, for each family, of which Hugging Face tensors make up which Megatron parameter."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vime.errors import ModelError
from vime.models.families import FAMILIES, has_qkv_bias, num_dense_layers, num_experts
from vime.models.rows import Config, positive

Layout = Literal["plain", "qkv", "gate_up"]
"""plain: one tensor. qkv: query, key and value interleaved by query group. gate_up: gate rows above up rows, which are
one tensor or two."""


@dataclass(frozen=True)
class WeightRule:
    """One full (unsharded) Megatron parameter and the Hugging Face tensors that hold the same numbers."""

    megatron_name: str
    """Name with the layer's and the expert's number in the whole model."""
    hf_names: tuple[str, ...]
    layout: Layout = "plain"
    shard_dim: int | None = None
    """Dimension that tensor parallelism (of the experts, for an expert) cuts; None for a replicated parameter."""
    layer: int | None = None
    """Layer in the whole model, those for further tokens last; None outside the layers."""
    expert: int | None = None
    """Expert of the layer, whose parameters have a parallel layout of their own; None for all others."""

    is_copy: bool = False
    """Whether the files hold the parameter under these names once more."""

    @property
    def layer_prefix(self) -> str:
        """What the Megatron names of a layer's parameters begin with; empty outside the layers."""
        match = re.match(r"\w+\.layers\.\d+\.", self.megatron_name)
        return match[0] if match else ""

    @property
    def is_vocabulary(self) -> bool:
        """Whether Megatron may have more rows than the vocabulary, for tensor parallelism."""
        return self.megatron_name in _VOCABULARY


@dataclass(frozen=True)
class Family:
    """Parts of a layer, in the order in which weights are published; `{}` in a name stands for the expert."""

    attention: tuple[WeightRule, ...]
    expert_mlp: tuple[WeightRule, ...] = ()
    """What stands for the dense feed-forward part in a layer of experts."""
    dense_mlp: tuple[WeightRule, ...] = ()
    """Where the dense feed-forward part has other names than those of most families."""
    may_lack_bias: bool = False
    """Whether only some members have the bias of `attention`."""
    has_further_layers: bool = False
    """Whether there are names for layers that predict further tokens."""


def _rule(
    megatron: str, *hf: str, layout: Layout = "plain", shard_dim: int | None = None, per_expert: bool = False
) -> WeightRule:
    return WeightRule(megatron, hf, layout, shard_dim, expert=0 if per_expert else None)


def _gated_mlp(megatron: str, hf: str, *, per_expert: bool = False) -> tuple[WeightRule, ...]:
    gate_up = (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight")
    fc1, fc2 = f"{megatron}.linear_fc1.weight", f"{megatron}.linear_fc2.weight"
    return (
        _rule(fc1, *gate_up, layout="gate_up", shard_dim=0, per_expert=per_expert),
        _rule(fc2, f"{hf}.down_proj.weight", shard_dim=1, per_expert=per_expert),
    )


def _fused_mlp(megatron: str, hf: str) -> tuple[WeightRule, ...]:
    return (
        _rule(f"{megatron}.linear_fc1.weight", f"{hf}.gate_up_proj.weight", layout="gate_up", shard_dim=0),
        _rule(f"{megatron}.linear_fc2.weight", f"{hf}.down_proj.weight", shard_dim=1),
    )


def _qkv(kind: Literal["weight", "bias"]) -> WeightRule:
    parts = (f"self_attn.{part}_proj.{kind}" for part in "qkv")
    return _rule(f"self_attention.linear_qkv.{kind}", *parts, layout="qkv", shard_dim=0)


_BEFORE = _rule("input_layernorm.weight", "input_layernorm.weight")
_AFTER = (
    _rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight", shard_dim=1),
    _rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
)
_QK_NORMS = (
    _rule("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    _rule("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)
_LATENT = (
    _rule("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", shard_dim=0),
    _rule("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
    _rule("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", shard_dim=0),
    _rule("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", shard_dim=0),
    _rule("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    _rule("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", shard_dim=0),
)
_DENSE_MLP = _gated_mlp("mlp", "mlp")
_QKV_BIAS = _qkv("bias")
_EXPERTS = (
    _rule("mlp.router.weight", "mlp.gate.weight"),
    *_gated_mlp("mlp.experts.local_experts.{}", "mlp.experts.{}", per_expert=True),
)
_BIASED_ROUTER = _rule("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias")

NAMES: dict[str, Family] = {
    "qwen2": Family((_BEFORE, _qkv("weight"), _QKV_BIAS, *_AFTER)),
    "qwen3": Family((_BEFORE, _qkv("weight"), *_QK_NORMS, *_AFTER)),
    "qwen3_moe": Family((_BEFORE, _qkv("weight"), *_QK_NORMS, *_AFTER), _EXPERTS),
    "llama": Family((_BEFORE, _qkv("weight"), *_AFTER)),
    "glm": Family(
        (_BEFORE, _qkv("weight"), _QKV_BIAS, *_AFTER), dense_mlp=_fused_mlp("mlp", "mlp"), may_lack_bias=True
    ),
    "deepseek_v3": Family(
        (_BEFORE, *_LATENT, *_AFTER),
        (_BIASED_ROUTER, *_EXPERTS, *_gated_mlp("mlp.shared_experts", "mlp.shared_experts")),
        has_further_layers=True,
    ),
}

WITH_FURTHER_LAYERS = tuple(name for name, family in NAMES.items() if family.has_further_layers)
"""Families whose layers for further tokens have names here."""

_EMBEDDING = WeightRule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), shard_dim=0)
_FINAL_NORM = WeightRule("decoder.final_layernorm.weight", ("model.norm.weight",))
_HEAD = WeightRule("output_layer.weight", ("lm_head.weight",), shard_dim=0)
_VOCABULARY = (_EMBEDDING.megatron_name, _HEAD.megatron_name)


_FURTHER = (
    _rule("enorm.weight", "enorm.weight"),
    _rule("hnorm.weight", "hnorm.weight"),
    _rule("eh_proj.weight", "eh_proj.weight", shard_dim=0),
    _rule("final_layernorm.weight", "shared_head.norm.weight"),
)
_FURTHER_COPIES = (
    dataclasses.replace(_EMBEDDING, hf_names=("embed_tokens.weight",), is_copy=True),
    dataclasses.replace(_HEAD, hf_names=("shared_head.head.weight",), is_copy=True),
)


def is_tied(hf_config: Config) -> bool:
    """Whether the output head shares the embedding matrix."""
    return bool(hf_config.get("tie_word_embeddings", False))


def num_further_layers(hf_config: Config) -> int:
    """Layers of a checkpoint that predict further tokens, where vime knows their names and they have a head."""
    family = NAMES.get(str(hf_config.get("model_type")))
    known = family is not None and family.has_further_layers and not is_tied(hf_config)
    return int(hf_config.get("num_nextn_predict_layers") or 0) if known else 0


def weight_rules(hf_config: Config, num_further: int = 0) -> list[WeightRule]:
    """Rules of the whole model, in the order in which weights are published: embedding, layers, norm, head.

    After these come `num_further` layers that predict further tokens.

    Raises:
        ModelError: a `model_type` without a table.
    """
    family = NAMES.get(str(hf_config.get("model_type")))
    if family is None:
        raise ModelError(
            f"config.json: model_type is {hf_config.get('model_type')!r}, allowed: {', '.join(FAMILIES)}.",
            next_step="Choose a checkpoint of an allowed type.",
        )
    first_expert_layer = num_dense_layers(hf_config) if family.expert_mlp else positive(hf_config, "num_hidden_layers")
    without = (_QKV_BIAS,) if family.may_lack_bias and not has_qkv_bias(hf_config) else ()
    attention = tuple(part for part in family.attention if part not in without)
    rules = [_EMBEDDING]
    for layer in range(positive(hf_config, "num_hidden_layers")):
        mlp = family.dense_mlp or _DENSE_MLP if layer < first_expert_layer else family.expert_mlp
        rules += _in_layer(layer, (*attention, *mlp), hf_config)
    rules += [_FINAL_NORM] if is_tied(hf_config) else [_FINAL_NORM, _HEAD]
    for depth in range(num_further):
        rules += _further_layer(depth, (*attention, *family.expert_mlp), hf_config)
    return rules


def _further_layer(depth: int, parts: tuple[WeightRule, ...], hf_config: Config) -> Iterator[WeightRule]:
    """A layer of its own behind the model's, with what joins hidden states and embeddings before it."""
    layer, prefix = positive(hf_config, "num_hidden_layers") + depth, f"mtp.layers.{depth}"
    for rule in _in_layer(layer, parts, hf_config):
        inner = rule.megatron_name.removeprefix(f"decoder.layers.{layer}.")
        yield dataclasses.replace(rule, megatron_name=f"{prefix}.mtp_model_layer.{inner}")
    for rule in _FURTHER:
        yield dataclasses.replace(_numbered(rule, layer, None), megatron_name=f"{prefix}.{rule.megatron_name}")
    for rule in _FURTHER_COPIES:
        yield dataclasses.replace(_numbered(rule, layer, None), megatron_name=rule.megatron_name, layer=None)


def _in_layer(layer: int, parts: tuple[WeightRule, ...], hf_config: Config) -> Iterator[WeightRule]:
    yield from (_numbered(part, layer, None) for part in parts if part.expert is None)
    per_expert = [part for part in parts if part.expert is not None]
    for expert in range(num_experts(hf_config) if per_expert else 0):
        yield from (_numbered(part, layer, expert) for part in per_expert)


def _numbered(part: WeightRule, layer: int, expert: int | None) -> WeightRule:
    return dataclasses.replace(
        part,
        megatron_name=f"decoder.layers.{layer}.{part.megatron_name.format(expert)}",
        hf_names=tuple(f"model.layers.{layer}.{name.format(expert)}" for name in part.hf_names),
        layer=layer,
        expert=expert,
    )
