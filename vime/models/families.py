"""The table of each family of models, by the `model_type` of its `config.json`."""

from __future__ import annotations

import json
from typing import Any

from vime.errors import ModelError
from vime.models.rope import rope_rows
from vime.models.rows import (
    Config,
    Row,
    Shape,
    Value,
    expand_layers,
    fixed,
    layer_pattern,
    number,
    positive,
    real,
    switch,
    whole,
)

BIASED_ROUTER = "noaux_tc"
"""`topk_method` of a router with a selection bias. DeepSeek's own files have it; transformers doesn't write it."""


def _swiglu(config: Config) -> bool:
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"config.json: hidden_act is {config['hidden_act']!r}, allowed: silu.")
    return True


def _no_linear_bias(config: Config) -> bool:
    _refuse(config, "mlp_bias")
    return True


def _refuse(config: Config, *keys: str) -> None:
    """Raise `ModelError` for the first entry that is true, or not empty."""
    for key in keys:
        if config.get(key):
            raise ModelError(
                f"config.json: {key} is {json.dumps(config[key])[:80]}, allowed: false or left out.",
                next_step="Choose a checkpoint without it.",
            )


def _whole_weights(config: Config) -> int:
    _refuse(config, "quantization_config", "use_sliding_window")
    return positive(config, "hidden_size")


def _head_size(config: Config) -> int:
    heads = positive(config, "num_attention_heads")
    return positive(config, "head_dim") if config.get("head_dim") else positive(config, "hidden_size") // heads


def _query_groups(config: Config) -> int:
    key = "num_key_value_heads" if config.get("num_key_value_heads") else "num_attention_heads"
    return positive(config, key)


_COMMON = (
    whole("--num-layers", "num_hidden_layers"),
    Row("--hidden-size", int, "hidden_size", _whole_weights, lambda shape: {"hidden_size": shape["--hidden-size"]}),
    whole("--ffn-hidden-size", "intermediate_size"),
    whole("--num-attention-heads", "num_attention_heads"),
    whole("--vocab-size", "vocab_size"),
    whole("--max-position-embeddings", "max_position_embeddings", compared=False),
    fixed("--normalization", "RMSNorm"),
    real("--norm-epsilon", "rms_norm_eps", default=1e-6),
    Row("--swiglu", bool, "hidden_act", _swiglu, lambda _: {"hidden_act": "silu"}),
    Row("--disable-bias-linear", bool, "mlp_bias", _no_linear_bias, lambda _: {}),
    switch("--untie-embeddings-and-output-weights", "tie_word_embeddings", on=False),
    fixed("--position-embedding-type", "rope", aliases=("--use-rotary-position-embeddings",)),
)

_GROUPED_ATTENTION = (
    fixed("--group-query-attention", True),
    Row(
        "--num-query-groups",
        int,
        "num_key_value_heads",
        _query_groups,
        lambda shape: {"num_key_value_heads": shape["--num-query-groups"]},
    ),
    Row("--kv-channels", int, "head_dim", _head_size, lambda shape: {"head_dim": shape["--kv-channels"]}),
)


def num_experts(config: Config) -> int:
    """Experts of a layer, without shared ones; the number has several names."""
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    return positive(config, next((name for name in names if name in config), names[-1]))


def num_dense_layers(config: Config) -> int:
    """Layers without experts before the first with them, in a family that has experts."""
    return int(number(config, "first_k_dense_replace", 0))


def _experts_everywhere(config: Config) -> int:
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise ModelError("config.json: dense layers between expert layers, allowed: experts in every layer.")
    _normalised(config)
    return num_experts(config)


def _normalised(config: Config) -> None:
    if not config.get("norm_topk_prob", True):
        raise ModelError("config.json: norm_topk_prob is false, allowed: true.")


_EXPERTS = (
    Row(
        "--num-experts",
        int,
        "num_experts",
        _experts_everywhere,
        lambda shape: {"num_experts": shape["--num-experts"], "norm_topk_prob": True},
    ),
    whole("--moe-router-topk", "num_experts_per_tok"),
    whole("--moe-ffn-hidden-size", "moe_intermediate_size"),
)


def _shared_size(config: Config) -> int:
    return positive(config, "n_shared_experts") * positive(config, "moe_intermediate_size")


def _shared_count(shape: Shape) -> dict[str, Any]:
    sizes = int(shape["--moe-shared-expert-intermediate-size"]), int(shape["--moe-ffn-hidden-size"])
    return {"n_shared_experts": sizes[0] // sizes[1]}


def _layer_freq(config: Config) -> str:
    layers, dense = positive(config, "num_hidden_layers"), num_dense_layers(config)
    return layer_pattern([0] * dense + [1] * (layers - dense))


def _num_dense(shape: Shape) -> dict[str, Any]:
    return {"first_k_dense_replace": expand_layers(str(shape["--moe-layer-freq"])).count(0)}


def _latent_experts(config: Config) -> Value:
    _normalised(config)
    chosen, groups = positive(config, "num_experts_per_tok"), positive(config, "n_group")
    if chosen == 1 or (groups > 1 and chosen // positive(config, "topk_group") != 2):
        raise ModelError(
            f"config.json: {chosen} experts of {config.get('topk_group')} of {groups} groups serve a token, allowed: "
            "twice as many experts as groups, or two and more of one group.",
            next_step="Megatron scores a group by as many experts as it takes from it, the model by two.",
        )
    return positive(config, "n_routed_experts")


def _sigmoid(config: Config) -> str:
    return _only(config, "scoring_func", "sigmoid")


def _biased(config: Config) -> bool:
    return _only(config, "topk_method", BIASED_ROUTER) == BIASED_ROUTER


def _only(config: Config, key: str, allowed: str) -> str:
    """The one value that is built; `ModelError` for another. The entry may be left out."""
    found = config.get(key, allowed)
    if found != allowed:
        raise ModelError(
            f"config.json: {key} is {found!r}, allowed: {allowed}.", next_step="Choose a checkpoint with that value."
        )
    return allowed


_LATENT_ATTENTION = (
    fixed("--multi-latent-attention", True),
    whole("--q-lora-rank", "q_lora_rank"),
    whole("--kv-lora-rank", "kv_lora_rank"),
    whole("--qk-head-dim", "qk_nope_head_dim"),
    whole("--qk-pos-emb-head-dim", "qk_rope_head_dim"),
    whole("--v-head-dim", "v_head_dim"),
    fixed("--qk-layernorm", True),
)

_DEEPSEEK_EXPERTS = (
    Row(
        "--num-experts",
        int,
        "n_routed_experts",
        _latent_experts,
        lambda shape: {"n_routed_experts": shape["--num-experts"], "norm_topk_prob": True},
    ),
    *_EXPERTS[1:],
    Row(
        "--moe-shared-expert-intermediate-size",
        int,
        "n_shared_experts x moe_intermediate_size",
        _shared_size,
        _shared_count,
    ),
    Row("--moe-layer-freq", str, "first_k_dense_replace", _layer_freq, _num_dense),
    Row("--moe-router-score-function", str, "scoring_func", _sigmoid, lambda _: {"scoring_func": "sigmoid"}),
    Row("--moe-router-enable-expert-bias", bool, "topk_method", _biased, lambda _: {"topk_method": BIASED_ROUTER}),
    whole("--moe-router-num-groups", "n_group"),
    whole("--moe-router-group-topk", "topk_group"),
    real("--moe-router-topk-scaling-factor", "routed_scaling_factor"),
)

_NO_QK_NORM = fixed("--qk-layernorm", False)
_QK_NORM = fixed("--qk-layernorm", True)
_QKV_BIAS = switch("--add-qkv-bias", "attention_bias", default=True)


def _no_attention_bias(config: Config) -> bool:
    """In these families the entry also stands for a bias of the output projection, which is not built."""
    _refuse(config, "attention_bias")
    return False


_NO_BIAS = Row("--add-qkv-bias", bool, "attention_bias", _no_attention_bias, lambda _: {})

FAMILIES: dict[str, tuple[Row, ...]] = {
    "qwen2": (*_COMMON, *_GROUPED_ATTENTION, fixed("--add-qkv-bias", True), _NO_QK_NORM, *rope_rows()),
    "qwen3": (*_COMMON, *_GROUPED_ATTENTION, _NO_BIAS, _QK_NORM, *rope_rows()),
    "qwen3_moe": (*_COMMON, *_GROUPED_ATTENTION, _NO_BIAS, _QK_NORM, *rope_rows(), *_EXPERTS),
    "llama": (*_COMMON, *_GROUPED_ATTENTION, _NO_BIAS, _NO_QK_NORM, *rope_rows("llama3")),
    "glm": (*_COMMON, *_GROUPED_ATTENTION, _QKV_BIAS, _NO_QK_NORM, *rope_rows("partial")),
    "deepseek_v3": (*_COMMON, _NO_BIAS, *_LATENT_ATTENTION, *rope_rows("yarn"), *_DEEPSEEK_EXPERTS),
}


def has_qkv_bias(config: Config) -> bool:
    """Whether queries, keys and values have a bias, in a family some of whose members have one."""
    return bool(config.get("attention_bias", True))


def family_of(config: Config) -> str | None:
    """The `model_type` of a `config.json`; None for one that isn't in `FAMILIES`."""
    found = config.get("model_type")
    return found if isinstance(found, str) and found in FAMILIES else None


def family_named(name: str) -> str | None:
    """The family that a name stands for: its `model_type`, or a class of transformers; None for any other.

    `Qwen3MoeConfig`, `Qwen3MoeForCausalLM` and `qwen3moe` are `qwen3_moe`.
    """
    plain = _plain(name)
    for ending in ("config", "forcausallm"):
        plain = plain.removesuffix(ending)
    return next((family for family in FAMILIES if _plain(family) == plain), None)


def named_config(config: Config, name: str | None) -> dict[str, Any]:
    """A `config.json` as one of the family that `name` stands for; as it is without a name.

    Raises `ModelError` for a name of no family.
    """
    if name is None:
        return dict(config)
    family = family_named(name)
    if family is None:
        raise ModelError(
            f"--model-name is {name!r}, allowed: {', '.join(FAMILIES)}.", next_step="Name a family that vime knows."
        )
    return {**config, "model_type": family}


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))
