"""The critic's output: one number for a token in place of logits over the vocabulary."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

NAME = "output_layer"
"""Where the head stands in the model: in the language model's place."""


class ValueHead(torch.nn.Module):
    """A linear map from hidden states [N, H] to values [N] in float32, the same on all ranks of tensor parallelism.

    It starts at zero, so an untrained critic expects nothing and advantages are the rewards to come.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self._sequence_parallel = config.sequence_parallel
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        kind = {"dtype": config.params_dtype, "device": device}
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, **kind))
        self.bias = torch.nn.Parameter(torch.zeros(1, **kind))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())[:, 0]

    def of_rows(self, hidden_states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Values [R] of the tokens `rows` of this rank's hidden states [T, 1, H].

        Every rank of tensor parallelism computes all of them, so a gradient is complete on each and isn't summed.
        """
        if self._sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        values: torch.Tensor = self(hidden_states[:, 0].index_select(0, rows))
        return values


def with_value_head(model: torch.nn.Module, config: TransformerConfig) -> torch.nn.Module:
    """Put a value head in place of the output layer of a model that has one (the last pipeline stage)."""
    model.share_embeddings_and_output_weights = False  # type: ignore[assignment]
    if model.post_process:
        model.output_layer = ValueHead(config)
    return model
