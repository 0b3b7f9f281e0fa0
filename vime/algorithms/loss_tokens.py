"""What the loss reads of a microbatch, without saying where it comes from."""

from __future__ import annotations

from typing import Protocol

import torch


class LossTokens(Protocol):
    """What the loss reads of one microbatch: S sequences, R response tokens end to end."""

    @property
    def loss_mask(self) -> torch.Tensor:
        """[R] bool"""

    @property
    def sample_indices(self) -> tuple[int, ...]:
        """[S] `Sample.index`"""

    @property
    def total_lengths(self) -> torch.Tensor:
        """[S] int64, prompt and response"""

    @property
    def response_lengths(self) -> torch.Tensor:
        """[S] int64"""

    @property
    def mask_sums(self) -> torch.Tensor:
        """[S] float32, trained tokens of the whole rollout that the sequence belongs to"""

    @property
    def advantages(self) -> torch.Tensor:
        """[R] float32"""

    @property
    def sampler_log_probs(self) -> torch.Tensor:
        """[R] float32"""

    @property
    def old_log_probs(self) -> torch.Tensor | None:
        """[R] float32 of the trainer before the batch's first step; None where they weren't computed."""

    @property
    def old_entropies(self) -> torch.Tensor | None:
        """[R] float32 of the trainer before the batch's first step; None where they weren't asked for."""

    @property
    def reference_log_probs(self) -> torch.Tensor | None:
        """[R] float32 of the reference model; None where there is none."""

    @property
    def teacher_log_probs(self) -> torch.Tensor | None:
        """[R] float32 of the teacher of on-policy distillation; None where there is none."""
