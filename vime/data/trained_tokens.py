"""What a trainer made of the tokens of one sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TrainedTokens:
    """The R response tokens of a sample in the optimizer step that trained it."""

    log_probs: npt.NDArray[np.float32]
    """[R] natural log under the weights that the step began with."""
    advantages: npt.NDArray[np.float32]
    """[R] as the objective read them."""
    mean_gap: float
    """Mean over the trained tokens of |trainer's - sampler's log-probability|."""
