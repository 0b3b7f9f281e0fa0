"""Random steps with ragged sequences, masks, split rollouts and policies that differ; the same for every formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from vime.data.batch import StepTotals


@dataclass
class Sequence_:
    """One sequence; arrays are per response token."""

    rollout: int
    prompt_length: int
    mask: list[int]
    log_probs: list[float]
    old: list[float]
    sampler: list[float]
    reference: list[float]
    teacher: list[float]
    entropies: list[float]
    advantages: list[float]
    corrections: list[float]

    @property
    def length(self) -> int:
        return len(self.mask)


@dataclass(frozen=True)
class Tokens:
    """Sequences end to end as the loss reads them."""

    loss_mask: torch.Tensor
    total_lengths: torch.Tensor
    response_lengths: torch.Tensor
    mask_sums: torch.Tensor
    advantages: torch.Tensor
    sampler_log_probs: torch.Tensor
    old_log_probs: torch.Tensor | None
    reference_log_probs: torch.Tensor | None
    teacher_log_probs: torch.Tensor | None = None
    sample_indices: tuple[int, ...] = ()
    old_entropies: torch.Tensor | None = None


def random_step(seed: int, *, token_advantages: bool = False) -> list[Sequence_]:
    """Three to seven sequences of 1 to 12 tokens; two are segments of one rollout, one may be wholly masked."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 8))
    masked = int(rng.integers(count)) if rng.random() < 0.5 else -1
    sequences = []
    for number in range(count):
        length = int(rng.integers(1, 13))
        mask = (rng.random(length) < 0.7).astype(int)
        mask[int(rng.integers(length))] = 1
        log_probs = -np.abs(rng.normal(1.5, 1.0, length))
        advantages = rng.normal(size=length) if token_advantages else np.full(length, rng.normal())

        def near(scale: float, log_probs: np.ndarray = log_probs, length: int = length) -> list[float]:
            return _float32(log_probs + rng.normal(0.0, scale, length))

        sequences.append(
            Sequence_(
                rollout=0 if number == count - 1 else number,
                prompt_length=int(rng.integers(1, 4)),
                mask=(mask * int(number != masked)).tolist(),
                log_probs=_float32(log_probs),
                old=near(0.3),
                sampler=near(0.4),
                reference=near(0.8),
                teacher=near(0.6),
                entropies=_float32(rng.random(length) * 3),
                advantages=_float32(advantages),
                corrections=_float32(rng.normal(size=length)),
            )
        )
    return sequences


def totals(sequences: Sequence[Sequence_]) -> StepTotals:
    return StepTotals(
        num_rollouts=len({item.rollout for item in sequences}),
        num_trained_tokens=sum(max(sum(item.mask), 1) for item in sequences),
    )


def tokens(step: Sequence[Sequence_], members: Sequence[int], *, stored: bool = True) -> Tokens:
    """The sequences at `members` as one microbatch; denominators come from the whole step."""
    chosen = [step[member] for member in members]
    sums = [sum(sum(other.mask) for other in step if other.rollout == item.rollout) for item in chosen]
    return Tokens(
        loss_mask=flat(chosen, "mask").bool(),
        total_lengths=torch.tensor([item.prompt_length + item.length for item in chosen]),
        response_lengths=lengths(chosen),
        mask_sums=torch.tensor(sums, dtype=torch.float32),
        advantages=flat(chosen, "advantages"),
        sampler_log_probs=flat(chosen, "sampler"),
        old_log_probs=flat(chosen, "old") if stored else None,
        reference_log_probs=flat(chosen, "reference"),
        teacher_log_probs=flat(chosen, "teacher"),
        sample_indices=tuple(members),
    )


def lengths(sequences: Sequence[Sequence_]) -> torch.Tensor:
    return torch.tensor([item.length for item in sequences], dtype=torch.int64)


def flat(sequences: Sequence[Sequence_], name: str) -> torch.Tensor:
    """One array of all sequences end to end, float32 [R]."""
    return torch.tensor([value for item in sequences for value in getattr(item, name)], dtype=torch.float32)


def spoiled(step: Sequence[Sequence_], value: float) -> list[Sequence_]:
    """The same step with `value` in every array wherever the mask is zero."""
    names = ("log_probs", "old", "sampler", "reference", "teacher", "entropies", "advantages", "corrections")
    return [
        replace(
            item,
            **{
                name: [old if kept else value for old, kept in zip(getattr(item, name), item.mask, strict=True)]
                for name in names
            },
        )
        for item in step
    ]


def assert_close(found: torch.Tensor, expected: object, *, rel: float = 1e-5) -> None:
    """Every element is within `rel` of the expected one, measured by the largest expected element."""
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    difference = float((found.detach().double() - wanted).abs().max()) if wanted.numel() else 0.0
    assert found.shape == wanted.shape
    assert difference <= rel * max(scale, 1e-3), f"difference {difference} at scale {scale}"


def _float32(values: np.ndarray) -> list[float]:
    """Numbers that float32 and float64 represent alike."""
    return values.astype(np.float32).astype(float).tolist()
