"""A step with reference model and teacher in float64: three Hugging Face models, then the dense objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.reference.dense_advantages import discounted_returns, whitened
from tests.reference.dense_objective import Options, step_objective
from tests.reference.ragged_batches import Sequence_
from tests.vime.backends.megatron_utils import tiny_batches
from tests.vime.backends.megatron_utils.dense_reference import dense_logits, load_double


@dataclass(frozen=True)
class Shaping:
    """How advantages come from rewards and frozen models, in the words of the flags."""

    returns: bool = False
    """reinforce_plus_plus in place of the reward at every token."""
    kl_coef: float = 0.0
    kl_kind: str = "k1"
    gamma: float = 1.0
    opd_kl_coef: float = 0.0
    whiten: bool = False


def frozen_step(
    actor: Any,
    reference: Path,
    teacher: Path,
    sequences: Sequence[tiny_batches.Sequence_],
    options: Options,
    shaping: Shaping,
    temperature: float,
) -> dict[str, float]:
    """Metrics of the step; its gradients are left in `actor`."""
    current_scores = [scored(actor, item, temperature) for item in sequences]
    with torch.no_grad():
        frozen = [
            [scored(model, item, temperature)[0].tolist() for item in sequences]
            for model in (load_double(reference), load_double(teacher))
        ]
    items = []
    for item, (log_probs, _), of_reference, of_teacher in zip(sequences, current_scores, *frozen, strict=True):
        current = log_probs.tolist()
        sampler = item.sampler_log_probs.astype(float).tolist()
        items.append(
            Sequence_(
                rollout=item.rollout,
                prompt_length=len(item.tokens) - item.response_length,
                mask=item.loss_mask.tolist(),
                log_probs=current,
                old=current,
                sampler=sampler,
                reference=of_reference,
                teacher=of_teacher,
                entropies=[],
                advantages=_advantages(item, sampler if options.old_is_sampler else current, of_reference, of_teacher,
                                       shaping),
                corrections=[],
            )
        )  # fmt: skip
    if shaping.whiten:
        flat = whitened([v for item in items for v in item.advantages], [m for item in items for m in item.mask])
        for item in items:
            item.advantages, flat = flat[: item.length], flat[item.length :]
    leaves = [{"log_probs": list(log_probs), "entropies": list(entropies)} for log_probs, entropies in current_scores]
    loss, metrics = step_objective(items, leaves, options)
    actor.zero_grad()
    loss.backward()
    return metrics


def scored(model: Any, item: tiny_batches.Sequence_, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy [R] of each response token."""
    prompt = len(item.tokens) - item.response_length
    rows = (dense_logits(model, item.tokens) / temperature)[prompt - 1 : -1].log_softmax(-1)
    targets = torch.as_tensor(item.tokens[prompt:].astype(np.int64))
    return rows[torch.arange(len(targets)), targets], -(rows.exp() * rows).sum(-1)


def _advantages(
    item: tiny_batches.Sequence_,
    old: Sequence[float],
    reference: Sequence[float],
    teacher: Sequence[float],
    shaping: Shaping,
) -> list[float]:
    reward, mask = float(np.float32(item.advantage)), item.loss_mask.tolist()
    difference = [one - other for one, other in zip(old, reference, strict=True)]
    kl = [d if shaping.kl_kind == "k1" else d * d / 2 for d in difference]
    found = (
        discounted_returns(reward, kl, mask, shaping.kl_coef, shaping.gamma)
        if shaping.returns
        else [reward] * len(mask)
    )
    return [a - shaping.opd_kl_coef * (o - t) for a, o, t in zip(found, old, teacher, strict=True)]
