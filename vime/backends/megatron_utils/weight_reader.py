"""Whole Megatron parameters, one at a time, out of checkpoints of any format and parallel layout."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from vime.backends.megatron_utils.hf_mapping import attention_shape, join
from vime.backends.megatron_utils.safetensors_files import SafetensorsReader
from vime.errors import ModelError
from vime.models.rows import positive
from vime.models.weight_names import WITH_FURTHER_LAYERS, WeightRule, is_tied, num_further_layers, weight_rules

_IGNORED = re.compile(r"rotary_emb\.inv_freq$")
_FURTHER = re.compile(r"(^|\.)mtp(_layers)?\.")
"""In names of layers for further tokens that lie apart from the others; DeepSeek's lie behind the last of these."""
_LISTED = 16


_WITHOUT_FURTHER = (
    "Name a copy of the checkpoint without these weights: the model itself is complete without its layers for further "
    "tokens."
)


class WeightReader(Protocol):
    """An open checkpoint."""

    @property
    def place(self) -> Path:
        """Where it lies, for messages."""
        ...

    @property
    def num_bytes(self) -> int:
        """Size of its files, which may hold more than weights."""
        ...

    def check_names(self, rules: Sequence[WeightRule]) -> None:
        """Raise `ModelError` listing weights that are missing and weights that the model doesn't know."""
        ...

    def has(self, rule: WeightRule) -> bool:
        """Whether the parameter, or a part of it, is there."""
        ...

    def shape(self, rule: WeightRule) -> tuple[int, ...]:
        """Shape of the full parameter, the vocabulary's padding included. Raises `ModelError`."""
        ...

    def dtype(self, rule: WeightRule) -> torch.dtype:
        """Dtype of the stored parameter."""
        ...

    def read(self, rule: WeightRule) -> torch.Tensor:
        """The full parameter in its stored dtype, on the CPU, without padding of the vocabulary."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class HuggingFaceReader:
    """A folder of safetensors files."""

    def __init__(self, checkpoint: Path, hf_config: Mapping[str, Any]) -> None:
        self.place = checkpoint
        self.tensors = SafetensorsReader(checkpoint)
        self._hf_config, self._attention = hf_config, attention_shape(hf_config)

    @property
    def num_bytes(self) -> int:
        return self.tensors.num_bytes

    def check_names(self, rules: Sequence[WeightRule]) -> None:
        wanted = {name for rule in rules for name in rule.hf_names}
        found = {name for name in self.tensors.names if name in wanted or not self._is_left_out(name)}
        check_names(self.place, wanted, found)

    def has(self, rule: WeightRule) -> bool:
        return any(name in self.tensors.names for name in rule.hf_names)

    def shape(self, rule: WeightRule) -> tuple[int, ...]:
        parts = [torch.empty(self.tensors.shape(name), device="meta") for name in rule.hf_names]
        return tuple(self._joined(rule, parts).shape)

    def dtype(self, rule: WeightRule) -> torch.dtype:
        return self.tensors.dtype(rule.hf_names[0])

    def read(self, rule: WeightRule) -> torch.Tensor:
        return self._joined(rule, [self.tensors.read(name) for name in rule.hf_names])

    def _joined(self, rule: WeightRule, parts: list[torch.Tensor]) -> torch.Tensor:
        try:
            return join(rule, parts, self._attention)
        except RuntimeError as error:
            shapes = ", ".join(f"{name} {tuple(part.shape)}" for name, part in zip(rule.hf_names, parts, strict=True))
            raise ModelError(
                f"{self.place}: these shapes don't go together: {shapes}.",
                next_step="Check that config.json belongs to these weights.",
            ) from error

    def refuse_further_layers(self, rules: Sequence[WeightRule]) -> None:
        """Raise `ModelError` naming weights of layers for further tokens that none of the rules is for."""
        names = {name for name in self.tensors.names if self._is_further(name) and not _IGNORED.search(name)}
        unknown = sorted(names - {name for rule in rules for name in rule.hf_names})
        if unknown:
            raise ModelError(
                f"{self.place}: layers for further tokens (multi-token prediction) that can't be converted: "
                f"{_listed(unknown)}; allowed: those of config.json's num_nextn_predict_layers of model_type "
                f"{' or '.join(WITH_FURTHER_LAYERS)}, with a head of their own.",
                next_step=_WITHOUT_FURTHER,
            )

    def _is_left_out(self, name: str) -> bool:
        """Constants, a head that is the embedding, and layers for multi-token prediction behind the last layer."""
        is_copy = name == "lm_head.weight" and is_tied(self._hf_config)
        predicts_more = bool(self._hf_config.get("num_nextn_predict_layers"))
        return bool(_IGNORED.search(name)) or is_copy or (self._is_further(name) and predicts_more)

    def _is_further(self, name: str) -> bool:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return layer is not None and int(layer[1]) >= int(self._hf_config["num_hidden_layers"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tensors.close()


def num_stored_further_layers(reader: WeightReader, hf_config: Mapping[str, Any]) -> int:
    """Layers for further tokens that a checkpoint holds, in whole or in part; it may lack those that it once had."""
    num_layers = positive(hf_config, "num_hidden_layers")
    rules = weight_rules(hf_config, num_further_layers(hf_config))
    further = [rule for rule in rules if rule.layer is not None and rule.layer >= num_layers]
    return max((1 + rule.layer - num_layers for rule in further if rule.layer and reader.has(rule)), default=0)


def check_names(place: Path, wanted: Iterable[str], found: Iterable[str]) -> None:
    """Raise `ModelError` listing names that are missing and names that aren't known."""
    missing, unexpected = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or unexpected:
        only_further = not missing and all(_FURTHER.search(name) for name in unexpected)
        raise ModelError(
            f"{place}: missing weights: {_listed(missing)}; unexpected weights: {_listed(unexpected)}.",
            next_step=_WITHOUT_FURTHER if only_further else "Check that config.json belongs to these weights.",
        )


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (", ".join(names[:_LISTED]) or "none") + rest
