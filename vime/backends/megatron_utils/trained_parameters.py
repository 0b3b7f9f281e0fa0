"""Which parameters are trained: --only-train-params-name-list and --freeze-params-name-list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.utils import unwrap_model

from vime.backends.megatron_utils import value_head
from vime.backends.megatron_utils.parallel import on_all_ranks
from vime.backends.megatron_utils.parameter_names import global_parameters
from vime.errors import SettingsError

_SHOWN = 6


@dataclass(frozen=True)
class TrainedParameters:
    """Regular expressions that are searched for in a parameter's name in the whole model; one of the two at most.

    Names are Megatron's, such as `decoder.layers.11.mlp.linear_fc1.weight`, with the layer's number in the whole model.
    """

    only: tuple[str, ...] | None = None
    """What is trained; None for all."""
    frozen: tuple[str, ...] | None = None
    """What isn't."""

    def trains(self, name: str) -> bool:
        if self.only is not None:
            return any(re.search(pattern, name) for pattern in self.only)
        return not any(re.search(pattern, name) for pattern in self.frozen or ())

    def apply(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Switch the gradients of the others off, before an optimizer is made; collective.

        A value head is always trained, since it starts from nothing. Raises `SettingsError` for an expression that no
        parameter of the model matches, and when no parameter is left to train.
        """
        if self.only is None and self.frozen is None:
            return
        parameters = global_parameters(chunks)
        heads = {
            f"{value_head.NAME}.{name}"
            for chunk in chunks
            for module in [vars(unwrap_model(chunk))["_modules"].get(value_head.NAME)]
            if isinstance(module, value_head.ValueHead)
            for name, _ in module.named_parameters()
        }
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in heads or self.trains(name))
        everywhere = on_all_ranks([name for name in parameters if name not in heads])
        self._check(sorted({name for names in everywhere for name in names}))

    def _check(self, names: Sequence[str]) -> None:
        flag = "--freeze-params-name-list" if self.only is None else "--only-train-params-name-list"
        examples = f"a part of names such as {', '.join(names[:: max(1, len(names) // _SHOWN)][:_SHOWN])}"
        for pattern in self.only or self.frozen or ():
            if not any(re.search(pattern, name) for name in names):
                raise SettingsError(
                    f"{flag} {pattern} matches no parameter, allowed: {examples}.", next_step="Correct the expression."
                )
        if not any(self.trains(name) for name in names):
            raise SettingsError(
                f"{flag} leaves no parameter to train, allowed: at least one.", next_step="Freeze fewer parameters."
            )
