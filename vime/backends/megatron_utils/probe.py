"""Logits of two checkpoints of one model on a few tokens, with one layer of each in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vime.backends.megatron_utils.attention import make_pack
from vime.backends.megatron_utils.context import WHOLE
from vime.backends.megatron_utils.safetensors_files import SafetensorsReader
from vime.backends.megatron_utils.skeleton import Skeleton
from vime.backends.megatron_utils.weight_reader import WeightReader
from vime.models.families import num_experts
from vime.models.weight_names import is_tied

NUM_TOKENS = 48
Fill = Callable[[str], torch.Tensor]
"""Reads a parameter or buffer by the name that it has in the model."""


def probe_tokens(vocab_size: int) -> torch.Tensor:
    """[48] int64: the same tokens for every model of this vocabulary."""
    return torch.from_numpy(np.random.default_rng(0).integers(0, vocab_size, NUM_TOKENS))


def relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference of two tensors of logits, relative to the largest logit."""
    return float((one - other).abs().max() / other.abs().max())


@torch.no_grad()
def megatron_logits(skeleton: Skeleton, reader: WeightReader, tokens: torch.Tensor) -> torch.Tensor:
    """[T, V] float32 logits of one sequence by Megatron's model with the weights of `reader`."""
    rules = {rule.megatron_name: rule for rule in skeleton.rules if not rule.is_copy}
    model = skeleton.model
    units = {"embedding": model.embedding, "decoder.final_layernorm": model.decoder.final_layernorm}
    units |= {f"decoder.layers.{number}": layer for number, layer in enumerate(model.decoder.layers)}
    if "output_layer.weight" in rules:
        units["output_layer"] = model.output_layer
    pack = make_pack(np.array([0, len(tokens)]), WHOLE, torch.device("cpu"))
    with _filled_one_by_one(units, lambda name: reader.read(rules[name]), keeps={"embedding"}):
        logits: torch.Tensor = model(tokens[None], torch.arange(len(tokens))[None], None, packed_seq_params=pack)
    return logits[0]


@torch.no_grad()
def hugging_face_logits(checkpoint: Path, hf_config: Mapping[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """[T, V] float32 logits of one sequence by transformers' model with the weights of a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = type(AutoConfig.for_model(hf_config["model_type"])).from_dict(dict(hf_config))
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **eager).eval()
    core = model.model
    core.rotary_emb = type(core.rotary_emb)(config)  # its constants are in no file
    units = {"model.embed_tokens": core.embed_tokens, "model.norm": core.norm, "lm_head": model.lm_head}
    units |= {f"model.layers.{number}": layer for number, layer in enumerate(core.layers)}
    with (
        SafetensorsReader(checkpoint) as tensors,
        _filled_one_by_one(units, _fill_of(tensors, hf_config), keeps=set()),
    ):
        logits: torch.Tensor = model(tokens[None], use_cache=False).logits
    return logits[0]


def _fill_of(tensors: SafetensorsReader, hf_config: Mapping[str, Any]) -> Fill:
    """transformers keeps the experts of a layer in two tensors [E, ...] whose parts the files name one by one."""

    def fill(name: str) -> torch.Tensor:
        if name == "lm_head.weight" and is_tied(hf_config):
            return tensors.read("model.embed_tokens.weight")
        if name in tensors.names:
            return tensors.read(name)
        prefix, _, part = name.rpartition(".")
        projections = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        experts = [f"{prefix}.{number}" for number in range(num_experts(hf_config))]
        return torch.stack(
            [torch.cat([tensors.read(f"{expert}.{each}.weight") for each in projections]) for expert in experts]
        )

    return fill


@contextmanager
def _filled_one_by_one(units: Mapping[str, torch.nn.Module], fill: Fill, *, keeps: set[str]) -> Iterator[None]:
    """Give each module its weights in float32 when it is called, and take them away after, but for `keeps`."""
    handles = []
    for prefix, unit in units.items():
        handles.append(unit.register_forward_pre_hook(_filler(prefix, fill), with_kwargs=True))
        if prefix not in keeps:
            handles.append(unit.register_forward_hook(lambda unit, *_: _empty([unit])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        _empty(units.values())


def _filler(prefix: str, fill: Fill) -> Callable[..., None]:
    def before(unit: torch.nn.Module, *_: Any) -> None:
        for name, tensor in _weights(unit):
            _put(unit, name, fill(f"{prefix}.{name}").to(torch.float32), tensor)

    return before


def _weights(unit: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and saved buffers."""
    found = unit.state_dict(keep_vars=True).items()
    return [(name, tensor) for name, tensor in found if isinstance(tensor, torch.Tensor)]


def _put(unit: torch.nn.Module, name: str, value: torch.Tensor, old: torch.Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    module = unit.get_submodule(path)
    if isinstance(old, torch.nn.Parameter):
        setattr(module, attribute, torch.nn.Parameter(value, requires_grad=False))
    else:
        setattr(module, attribute, value)


def _empty(units: Iterable[torch.nn.Module]) -> None:
    for unit in units:
        for name, tensor in _weights(unit):
            _put(unit, name, torch.empty_like(tensor, device="meta"), tensor)
