"""The one place where a Megatron-Core model is built."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
from megatron.training.argument_utils import core_transformer_config_from_args

from vime.backends.megatron_utils.attention import PackedCoreAttention
from vime.backends.megatron_utils.further_tokens import further_block
from vime.backends.megatron_utils.fused.rotation import rotation_of
from vime.backends.megatron_utils.fused.rule import has_kernels
from vime.backends.megatron_utils.gated_mlp import GatedMLP
from vime.backends.megatron_utils.grouped_experts import GroupedExperts
from vime.backends.megatron_utils.latent_attention import PackedLatentAttention
from vime.backends.megatron_utils.norm import RMSNorm
from vime.backends.megatron_utils.self_attention import PackedSelfAttention
from vime.backends.megatron_utils.value_head import with_value_head
from vime.errors import SettingsError

ModelProvider = Callable[..., torch.nn.Module]
"""A function of (pre_process, post_process, vp_stage=None) that builds one chunk of a model."""

_FURTHER_INPUTS = (
    *("input_ids", "position_ids", "attention_mask", "padding_mask", "packed_seq_params", "sequence_len_offset"),
    *("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"),
)
"""What layers for further tokens are called with, as the model's own."""


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
        frozen = decoder_input is not None and torch.is_grad_enabled() and not decoder_input.requires_grad
        if frozen and (self.config.recompute_granularity is not None or self.config.pipeline_model_parallel_size > 1):
            # Recomputation and the backward pass of a stage start from what requires a gradient.
            decoder_input.requires_grad_()
        if rotary is None:
            return output
        angles = rotary[position_ids[0]]
        if has_kernels(angles) and kwargs.get("packed_seq_params") is not None:
            rotation = rotation_of(angles, interleaved=self.config.rotary_interleaved)
            kwargs["packed_seq_params"].rotation = rotation
        return (decoder_input, angles, *rest)

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's; a pass with gradients also tells the output processor what each further depth knows.

        The output processor gets the hidden states of the depths as `further`. Without gradients, or without a pack
        that carries tokens to shift, they are not computed.
        """
        if not self.config.mtp_num_layers:
            return super()._postprocess(hidden_states, *args, **kwargs)
        pack, processor = kwargs["packed_seq_params"], kwargs["output_processor"]
        states: tuple[torch.Tensor, ...] = (hidden_states,)
        if self.mtp_process and pack is not None and pack.further_tokens and torch.is_grad_enabled():
            inputs = {name: kwargs[name] for name in _FURTHER_INPUTS}
            found = self.mtp(hidden_states=hidden_states, embedding=self.embedding, **inputs)
            states = found.chunk(1 + self.config.mtp_num_layers)
        if not self.post_process:
            return hidden_states
        if processor is None:
            logits, _ = self.output_layer(states[0])
            return logits.transpose(0, 1).contiguous()
        return processor(
            hidden_states=states[0],
            further=states[1:],
            output_layer=self.output_layer,
            output_weight=None,
            context=kwargs["output_processor_context"],
        )


def training_device() -> torch.device:
    """This process's GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def build_core_config(args: argparse.Namespace, *, replay_routes: bool) -> TransformerConfig:
    """Megatron-Core's configuration of one model; each model needs its own, since it carries hooks of the training."""
    config: TransformerConfig = core_transformer_config_from_args(args)
    config.variable_seq_lengths = args.pipeline_model_parallel_size > 1
    config.moe_enable_routing_replay = replay_routes
    config.calculate_per_token_loss = False  # both aggregations are ours; see StepLoss
    return config


def build_model(
    args: argparse.Namespace,
    config: TransformerConfig,
    *,
    provider: ModelProvider | None = None,
    value_head: bool = False,
) -> list[torch.nn.Module]:
    """Build this rank's part of the model, on its device, in the parameter dtype of `args`.

    One module, or one for each virtual pipeline stage of this rank. Needs Megatron's parallel groups. A `provider`
    builds the modules in place of this file; with `value_head` the last stage says one number for each token.
    """
    virtual_size = args.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in [None] if virtual_size is None else range(virtual_size):
        pre_process = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        post_process = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        if provider is None:
            shared = not args.untie_embeddings_and_output_weights and not value_head
            model = _gpt_model(args, config, stage, (pre_process, post_process), shared=shared)
        else:
            model = provider(pre_process, post_process, vp_stage=stage)
        if value_head:
            model = with_value_head(model, config)
        if torch.cuda.is_available():
            model = model.cuda()
        chunks.append(Float16Module(config, model) if config.bf16 or config.fp16 else model)
    return chunks


def _gpt_model(
    args: argparse.Namespace,
    config: TransformerConfig,
    virtual_stage: int | None,
    ends: tuple[bool, bool],
    *,
    shared: bool,
) -> torch.nn.Module:
    pre_process, post_process = ends
    groups_experts, further = not args.overlap_param_gather, None
    if config.mtp_num_layers and post_process:
        layer = _layer_spec(config, config.num_moe_experts, groups_experts=groups_experts)
        further = further_block(config.mtp_num_layers, layer)
    model = PackedGPTModel(
        config,
        _block_spec(config, virtual_stage, groups_experts=groups_experts),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=shared,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        vp_stage=virtual_stage,
        mtp_block_spec=further,
    )
    if further is not None and not model.mtp_process:
        raise SettingsError(
            f"--pipeline-model-parallel-layout {args.pipeline_model_parallel_layout} has no m on its last stage, "
            f"needed for --mtp-num-layers {config.mtp_num_layers}.",
            next_step="Write m before L in the layout.",
        )
    return model


def _block_spec(
    config: TransformerConfig, virtual_stage: int | None, *, groups_experts: bool
) -> TransformerBlockSubmodules:
    first = get_transformer_layer_offset(config, virtual_stage)
    pattern = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [1] * config.num_layers
    kinds = pattern[first : first + get_num_layers_to_build(config, virtual_stage)]
    return TransformerBlockSubmodules(
        layer_specs=[
            _layer_spec(config, config.num_moe_experts if kind else None, groups_experts=groups_experts)
            for kind in kinds
        ],
        layer_norm=RMSNorm,
    )


def _layer_spec(config: TransformerConfig, num_experts: int | None, *, groups_experts: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_submodules(
        num_experts=num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    if num_experts is None:
        layer.mlp = partial(GatedMLP.as_mlp_submodule, **layer.mlp.keywords)
    elif groups_experts:  # gathering that overlaps waits in front of each expert's own call
        parts = layer.mlp.keywords["submodules"]
        grouped = replace(parts, experts=partial(GroupedExperts, **parts.experts.keywords))
        layer.mlp = partial(layer.mlp, submodules=grouped)
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if config.multi_latent_attention:
        layer.self_attention.module = PackedLatentAttention
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    else:
        layer.self_attention.module = PackedSelfAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return ModuleSpec(module=TransformerLayer, submodules=layer)
