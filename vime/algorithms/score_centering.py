"""What the loss takes from the output head for score centering (arXiv 2609.20807)."""

from __future__ import annotations

from typing import NamedTuple

import torch


class CenteringTerms(NamedTuple):
    """Terms of each response token, float32 [R]; only `correction` carries a gradient.

    The gradient of `correction` is the expected weighted score under the sampler,
    sum_v q_v f(p_v / q_v) grad log p_v, with p the current trainer policy, q the sampler's and f the rule of the
    importance weight.
    """

    correction: torch.Tensor
    sampler_head_mass: torch.Tensor
    """Sampler probability of the candidates that the sum runs over."""
    train_head_mass: torch.Tensor
    """Trainer probability of the same candidates."""
