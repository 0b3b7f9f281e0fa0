"""Small packed batches with masks, split rollouts and every branch of the clipped loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vime.data.batch import PackedMicrobatch, StepTotals


@dataclass(frozen=True)
class Sequence_:
    """One sequence of a batch; arrays are per response token."""

    index: int
    rollout: int
    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    sampler_log_probs: npt.NDArray[np.float32]
    advantage: float

    @property
    def response_length(self) -> int:
        return len(self.loss_mask)


def make_sequences(seed: int, vocab_size: int = 50) -> list[Sequence_]:
    """Eight sequences of 4 to 30 tokens; 2 and 5 are segments of one rollout, 3 is wholly masked."""
    rng = np.random.default_rng(seed)
    sequences = []
    for index, (prompt, response) in enumerate([(3, 9), (1, 1), (6, 20), (4, 5), (2, 28), (7, 12), (5, 3), (3, 16)]):
        mask = (rng.random(response) < 0.8).astype(np.uint8)
        mask[0] = 1
        sequences.append(
            Sequence_(
                index=100 + index,
                rollout=2 if index == 5 else index,
                tokens=rng.integers(0, vocab_size, prompt + response).astype(np.int32),
                loss_mask=mask * np.uint8(index != 3),
                sampler_log_probs=-np.abs(rng.normal(4.0, 0.7, response)).astype(np.float32),
                advantage=float(rng.normal()) if index != 5 else sequences[2].advantage,
            )
        )
    return sequences


def mask_sum(sequences: Sequence[Sequence_], rollout: int) -> int:
    """Trained tokens of a rollout over all its segments."""
    return sum(int(item.loss_mask.sum()) for item in sequences if item.rollout == rollout)


def pack(sequences: Sequence[Sequence_], members: Sequence[int]) -> PackedMicrobatch:
    """Pack the sequences at `members` end to end; denominators come from all `sequences`."""
    chosen = [sequences[member] for member in members]
    return PackedMicrobatch(
        tokens=np.concatenate([item.tokens for item in chosen]),
        cu_seqlens=np.cumsum([0] + [len(item.tokens) for item in chosen]).astype(np.int32),
        response_lengths=np.array([item.response_length for item in chosen], np.int32),
        loss_mask=np.concatenate([item.loss_mask for item in chosen]),
        sampler_log_probs=np.concatenate([item.sampler_log_probs for item in chosen]),
        advantages=np.array([item.advantage for item in chosen], np.float32),
        mask_sums=np.array([mask_sum(sequences, item.rollout) for item in chosen], np.float32),
        sample_indices=np.array([item.index for item in chosen], np.int64),
    )


def totals(sequences: Sequence[Sequence_]) -> StepTotals:
    return StepTotals(
        num_rollouts=len({item.rollout for item in sequences}),
        num_trained_tokens=sum(max(int(item.loss_mask.sum()), 1) for item in sequences),
    )
