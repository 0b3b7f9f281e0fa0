"""What vime's worker hands to the core with a step's result: the experts that were chosen, and the nuclei.

It travels as an attribute of vLLM's `ModelRunnerOutput`, in the same process or pickled with it by vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from vime.backends.vllm_utils.plugin.columns import Nuclei

_ATTRIBUTE = "vime_extras"


@dataclass(frozen=True)
class StepExtras:
    """Of one step: `routes` [tokens of the step, L, K], and `nuclei` of each request in the batch."""

    routes: npt.NDArray[Any] | None = None
    nuclei: Nuclei | None = None


def add_extras(output: Any, extras: StepExtras) -> None:
    setattr(output, _ATTRIBUTE, extras)


def take_extras(output: Any) -> StepExtras:
    """Empty ones where the worker adds none."""
    extras: StepExtras = vars(output).get(_ATTRIBUTE, StepExtras())
    return extras
