"""Tensors of the sequences in a packed microbatch, on the CPU, as advantages need them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from vime.algorithms.kl import kl_terms
from vime.algorithms.objective_config import ObjectiveConfig
from vime.data.batch import PackedMicrobatch
from vime.errors import TrainerError


def mask_of(batch: PackedMicrobatch) -> torch.Tensor:
    return torch.tensor(batch.loss_mask, dtype=torch.bool)


def lengths_of(batch: PackedMicrobatch) -> torch.Tensor:
    return torch.tensor(batch.response_lengths, dtype=torch.int64)


def rewards_of(batch: PackedMicrobatch) -> torch.Tensor:
    return torch.tensor(batch.advantages, dtype=torch.float32)


def old_log_probs_of(batch: PackedMicrobatch, config: ObjectiveConfig) -> npt.NDArray[np.float32] | None:
    """[R] of the policy that the samples count as made by."""
    return batch.sampler_log_probs if config.use_rollout_logprobs else batch.old_log_probs


def kl_of(batch: PackedMicrobatch, config: ObjectiveConfig) -> torch.Tensor:
    """KL estimate of each token [R] between old and reference policy, zeros without a penalty."""
    if config.kl_coef == 0.0:
        return torch.zeros(len(batch.loss_mask))
    old = old_log_probs_of(batch, config)
    if old is None or batch.reference_log_probs is None:
        raise TrainerError(
            "the rewards carry a KL penalty, but the batch has no reference log-probabilities.",
            next_step="Give --ref-load, or leave out --kl-coef.",
        )
    return kl_terms(torch.tensor(old), torch.tensor(batch.reference_log_probs), config.kl_kind)
