"""What a model holds now, as digests: to tell whether an update changed anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase

from vime.backends.vllm_utils.digest import DigestKind, tensor_digests
from vime.errors import PublicationError


class HeldWeights:
    """Digests of a vLLM model's tensors, in the form that its kernels use.

    On a CPU linear layers hold packed weights that can't be read; what they make of fixed inputs stands for them.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._noted: dict[str, str] | None = None

    def remember(self) -> None:
        """Note what the model holds."""
        self._noted = self._digests()

    def compare(self) -> None:
        """Raise `PublicationError`, naming tensors, unless the model holds what was noted."""
        if self._noted is None:
            raise PublicationError("Nothing was noted to compare the weights with.")
        found = self._digests()
        different = sorted(
            name for name in found.keys() | self._noted.keys() if found.get(name) != self._noted.get(name)
        )
        if different:
            raise PublicationError(
                f"{len(different)} of {len(found)} tensors differ from those that the engine was started with, first "
                f"{', '.join(different[:3])}.",
                next_step="Check that the trainer's weights are those of --hf-checkpoint, in the engine's dtype.",
            )

    @torch.no_grad()
    def _digests(self) -> dict[str, str]:
        named = dict(self._tensors())
        in_host_memory = all(tensor.device.type == "cpu" for tensor in named.values())
        kind: DigestKind = "xxh3-128" if in_host_memory else "sum64"
        return dict(zip(named, tensor_digests(list(named.values()), kind), strict=True))

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._model.named_parameters():
            if parameter.numel():
                yield name, parameter.detach()
        for name, layer in self._model.named_modules():
            if isinstance(layer, LinearBase) and not layer.weight.numel():
                yield f"{name} (packed)", _output(layer)


def _output(layer: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, layer.input_size_per_partition, generator=generator).to(layer.params_dtype)
    output: torch.Tensor = layer.quant_method.apply(layer, inputs, None)
    return output
