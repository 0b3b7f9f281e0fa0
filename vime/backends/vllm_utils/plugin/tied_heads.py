"""Output layers that share their weight with the embedding.

A reload fills the shared weight through the embedding and counts nothing for the output layer. On a CPU, vLLM's output
layer computes with a packed copy of the weight, which such a reload does not renew: the model would answer with new
layers under an old head, without an error. So the head's own processing is run again after every reload.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


class TiedHeads:
    """Finds, in a loaded model, vocabulary layers whose weight belongs to an earlier one."""

    def __init__(self, model: torch.nn.Module) -> None:
        owners: set[int] = set()
        self._heads: dict[str, Any] = {}
        for name, layer in model.named_modules():
            if isinstance(layer, VocabParallelEmbedding):
                if id(layer.weight) in owners:
                    self._heads[name] = layer
                owners.add(id(layer.weight))

    @property
    def names(self) -> frozenset[str]:
        """Module names of the tied layers."""
        return frozenset(self._heads)

    def refresh(self) -> None:
        """Call after a complete reload."""
        for head in self._heads.values():
            head.quant_method.process_weights_after_loading(head)
