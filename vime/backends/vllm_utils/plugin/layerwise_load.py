"""One replacement of all weights of a vLLM model, part by part, through vLLM's layerwise reload."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from vime.backends.vllm_utils.plugin.coverage import abandon_reload, incomplete_layers
from vime.errors import PublicationError


class LayerwiseLoad:
    """The model can't sample from its making until `finish` or `abandon`, one of which must follow."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model, self._model_config = model, model_config
        initialize_layerwise_reload(model)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take checkpoint-named tensors. Those of a layer that isn't full yet are kept by reference."""
        loader: Any = self._model
        loader.load_weights(iter(tensors))

    def finish(self, filled_by_others: frozenset[str]) -> None:
        """Close the replacement; raises `PublicationError` when a layer outside `filled_by_others` isn't full."""
        missing = incomplete_layers(self._model, filled_by_others)
        if missing:
            self.abandon()
            raise PublicationError(
                f"The weights don't fill {len(missing)} layers of the model, first {', '.join(missing[:3])}.",
                next_step="Fence the engine and publish every tensor of the checkpoint.",
            )
        finalize_layerwise_reload(self._model, self._model_config)

    def abandon(self) -> None:
        """Put the old tensors back into layers that aren't full; full ones keep the new weights."""
        abandon_reload(self._model)
        finalize_layerwise_reload(self._model, self._model_config)
