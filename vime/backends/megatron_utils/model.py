"""The one place where a Megatron-Core model is built."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset

from vime.backends.megatron_utils.attention import PackedCoreAttention
from vime.backends.megatron_utils.latent_attention import PackedLatentAttention
from vime.backends.megatron_utils.norm import RMSNorm


class PackedGPTModel(GPTModel):  # type: ignore[misc]
    """`GPTModel` whose rotary embedding follows the position of each token in its own sequence.

    Megatron's packed path applies the rotation sequence by sequence, with a device synchronisation for each; here the
    angles are looked up by `position_ids` and the whole pack is rotated at once, with equal numbers. The positions
    also say which part of a sequence a rank of context parallelism holds, so the table of angles is never cut.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.config.multi_latent_attention:
            self.rotary_pos_emb.cp_group = None

    def _preprocess(self, input_ids: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = super()._preprocess(input_ids, position_ids, *args, **kwargs)
        if kwargs.get("packed_seq_params") is not None:
            kwargs["packed_seq_params"].positions = position_ids[0]
        decoder_input, rotary, *rest = output
        return (decoder_input, None if rotary is None else rotary[position_ids[0]], *rest)


def training_device() -> torch.device:
    """This process's GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def build_model(args: argparse.Namespace, config: TransformerConfig) -> list[torch.nn.Module]:
    """Build this rank's part of the model, on its device, in the parameter dtype of `args`.

    One module, or one for each virtual pipeline stage of this rank. Needs Megatron's parallel groups.
    """
    virtual_size = args.virtual_pipeline_model_parallel_size
    return [_build_chunk(args, config, stage) for stage in ([None] if virtual_size is None else range(virtual_size))]


def _build_chunk(args: argparse.Namespace, config: TransformerConfig, virtual_stage: int | None) -> torch.nn.Module:
    model: torch.nn.Module = PackedGPTModel(
        config,
        _block_spec(config, virtual_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        vp_stage=virtual_stage,
    )
    if torch.cuda.is_available():
        model = model.cuda()
    return Float16Module(config, model) if config.bf16 or config.fp16 else model


def _block_spec(config: TransformerConfig, virtual_stage: int | None) -> TransformerBlockSubmodules:
    first = get_transformer_layer_offset(config, virtual_stage)
    pattern = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [1] * config.num_layers
    kinds = pattern[first : first + get_num_layers_to_build(config, virtual_stage)]
    return TransformerBlockSubmodules(
        layer_specs=[_layer_spec(config, config.num_moe_experts if kind else None) for kind in kinds],
        layer_norm=RMSNorm,
    )


def _layer_spec(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    layer = get_gpt_layer_local_submodules(
        num_experts=num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if config.multi_latent_attention:
        layer.self_attention.module = PackedLatentAttention
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return ModuleSpec(module=TransformerLayer, submodules=layer)
