"""Weights between a Hugging Face checkpoint and the ranks of a Megatron model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from vime.backends.megatron_utils.hf_config import is_tied, num_experts
from vime.backends.megatron_utils.hf_mapping import attention_shape, merge_shards, pad_rows, split, take_shard
from vime.backends.megatron_utils.model import training_device
from vime.backends.megatron_utils.parameter_names import global_tensors
from vime.backends.megatron_utils.weight_reader import WeightReader
from vime.errors import ModelError
from vime.models.weight_names import WeightRule, weight_rules


def load_weights(
    chunks: Sequence[torch.nn.Module],
    reader: WeightReader,
    hf_config: Mapping[str, Any],
    *,
    apart: Collection[str] = (),
) -> None:
    """Fill this rank's parameters and buffers from a checkpoint of any format and layout, one after the other.

    Those `apart` keep their values.

    Raises `ModelError` listing the names that are missing from the checkpoint or that the model doesn't know, or the
    shape that doesn't fit.
    """
    rules = [rule for rule in weight_rules(hf_config, num_further_layers(chunks)) if not rule.is_copy]
    parameters = {name: value for name, value in global_tensors(chunks).items() if name not in apart}
    reader.check_names(rules)
    with torch.no_grad():
        for name, rule in _local_rules(rules, parameters, hf_config):
            parameter, group = parameters[name], _tensor_group(rule)
            full = reader.read(rule)
            if rule.is_vocabulary and full.size(0) < parameter.size(0) * group.size():
                full = pad_rows(full, parameter.size(0) * group.size())
            shard = take_shard(rule, full, group.rank(), group.size())
            if shard.shape != parameter.shape:
                raise ModelError(
                    f"{reader.place}: {', '.join(rule.hf_names)} give {tuple(shard.shape)} for {name}, "
                    f"allowed: {tuple(parameter.shape)}.",
                    next_step="Check that config.json belongs to these weights.",
                )
            parameter.copy_(shard)


def num_further_layers(chunks: Sequence[torch.nn.Module]) -> int:
    """Layers of the model that predict further tokens."""
    return int(getattr(unwrap_model(chunks[0]).config, "mtp_num_layers", None) or 0)


def iterate_hf_weights(
    chunks: Sequence[torch.nn.Module], hf_config: Mapping[str, Any], *, num_further: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, full tensor) in the order of `weight_rules`, gathered to global rank 0.

    With `num_further` layers for further tokens, of those that the model has.

    Collective: every rank iterates to the end. Rank 0 receives tensors of the parameter dtype on the training device,
    valid until the next item is asked for; the other ranks receive nothing.
    """
    parameters = global_tensors(chunks)
    shape = attention_shape(hf_config)
    for rule in weight_rules(hf_config, num_further):
        if not _is_gathered_here(rule):
            continue
        full = _gather(rule, parameters, hf_config)
        if full is None or dist.get_rank() != 0:
            continue
        if rule.is_vocabulary:
            full = full[: hf_config["vocab_size"]]
        yield from zip(rule.hf_names, split(rule, full, shape), strict=True)


def _is_gathered_here(rule: WeightRule) -> bool:
    """Whether this rank belongs to the first of the replicas of a parameter."""
    if rule.expert is not None:
        return bool(parallel_state.get_expert_data_parallel_rank() == 0)
    return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)


def _tensor_group(rule: WeightRule) -> dist.ProcessGroup:
    """The ranks that share a parameter."""
    get = (
        parallel_state.get_tensor_model_parallel_group
        if rule.expert is None
        else parallel_state.get_expert_tensor_parallel_group
    )
    group: dist.ProcessGroup = get()
    return group


def _gather(
    rule: WeightRule, parameters: Mapping[str, torch.Tensor], hf_config: Mapping[str, Any]
) -> torch.Tensor | None:
    """The full parameter, on global rank 0 at least: over tensor, then expert, then pipeline ranks."""
    own = parameters.get(rule.megatron_name)
    tensor_group = _tensor_group(rule)
    full: torch.Tensor | None = None
    if own is not None:
        local = own.detach()
        shards = [local]
        if rule.shard_dim is not None and tensor_group.size() > 1:
            shards = [torch.empty_like(local) for _ in range(tensor_group.size())]
            dist.all_gather(shards, local.contiguous(), group=tensor_group)
        full = merge_shards(rule, shards)
    stage = _stage_of(rule, parameters)
    pipeline_group = parallel_state.get_pipeline_model_parallel_group()
    if tensor_group.rank() != 0:
        return full
    if rule.expert is not None:
        expert_group = parallel_state.get_expert_model_parallel_group()
        if pipeline_group.rank() == stage:
            full = _broadcast(full, rule.expert * expert_group.size() // num_experts(hf_config), expert_group)
        if expert_group.rank() != 0:
            return full
    return _broadcast(full, stage, pipeline_group)


def _broadcast(tensor: torch.Tensor | None, source: int, group: dist.ProcessGroup) -> torch.Tensor | None:
    """The tensor of rank `source` of `group`, which alone needs to have it; nothing is sent where rank 0 has it."""
    if source == 0:
        return tensor
    sender, is_sender = dist.get_global_rank(group, source), group.rank() == source
    header: list[Any] = [(tuple(tensor.shape), tensor.dtype) if is_sender and tensor is not None else None]
    dist.broadcast_object_list(header, src=sender, group=group)
    if not is_sender or tensor is None:
        tensor = torch.empty(header[0][0], dtype=header[0][1], device=training_device())
    tensor = tensor.contiguous()
    dist.broadcast(tensor, src=sender, group=group)
    return tensor


def _stage_of(rule: WeightRule, parameters: Mapping[str, torch.Tensor]) -> int:
    """First pipeline stage that holds the parameter, or its layer's other experts, agreed over the pipeline group."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return 0
    layer = rule.layer_prefix
    owned = rule.megatron_name in parameters or (
        rule.expert is not None and any(name.startswith(layer) for name in parameters)
    )
    stage = torch.tensor([group.rank() if owned else group.size()], device=training_device())
    dist.all_reduce(stage, op=dist.ReduceOp.MIN, group=group)
    if int(stage) == group.size():
        raise ModelError(f"no pipeline stage holds {rule.megatron_name}.")
    return int(stage)


def _local_rules(
    rules: list[WeightRule], parameters: Mapping[str, torch.Tensor], hf_config: Mapping[str, Any]
) -> Iterator[tuple[str, WeightRule]]:
    """(name, rule) of every parameter of this rank, and of the buffers that have a rule.

    Raises `ModelError` for a parameter without one. A buffer without one is Megatron's own, as the selection bias that
    flags add to a family without it.
    """
    by_name = {rule.megatron_name: rule for rule in rules}
    if is_tied(hf_config):  # the last pipeline stage keeps a copy of the embedding as its head
        by_name["output_layer.weight"] = by_name["embedding.word_embeddings.weight"]
    unknown = sorted(
        name for name, tensor in parameters.items() if name not in by_name and isinstance(tensor, torch.nn.Parameter)
    )
    if unknown:
        raise ModelError(f"the model has parameters without a Hugging Face name: {', '.join(unknown)}.")
    yield from ((name, by_name[name]) for name in parameters if name in by_name)
