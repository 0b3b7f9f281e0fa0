"""The step's objective and its gradients, written from the formulas: dense, float64, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.vime.backends.megatron_utils.tiny_batches import Sequence_


def load_double(checkpoint: Path) -> Any:
    """The Hugging Face model in float64."""
    from transformers import AutoModelForCausalLM

    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64, **eager).eval()


def dense_logits(model: Any, tokens: Any) -> torch.Tensor:
    """[tokens, V] float64 of one sequence without any packing."""
    return model(torch.as_tensor(np.asarray(tokens), dtype=torch.int64)[None]).logits[0]


def step_reference(
    model: Any,
    sequences: Sequence[Sequence_],
    *,
    temperature: float,
    eps: tuple[float, float, float],
    per_token: bool,
) -> dict[str, float]:
    """Metrics of the step; gradients are left in the model. `eps` is (low, high, dual clip)."""
    low, high, dual = eps
    rollouts: dict[int, int] = {}
    for item in sequences:
        rollouts[item.rollout] = rollouts.get(item.rollout, 0) + int(item.loss_mask.sum())
    all_tokens = sum(max(int(item.loss_mask.sum()), 1) for item in sequences)
    loss = torch.zeros((), dtype=torch.float64)
    metrics = dict.fromkeys(["pg_clipfrac", "ppo_kl", "ois", "entropy_loss", "train_rollout_logprob_abs_diff"], 0.0)
    for item in sequences:
        logits = dense_logits(model, item.tokens) / temperature
        prompt = len(item.tokens) - item.response_length
        for position in range(item.response_length):
            if not item.loss_mask[position]:
                continue
            row = logits[prompt + position - 1]
            weight = 1 / all_tokens if per_token else 1 / (len(rollouts) * max(rollouts[item.rollout], 1))
            log_p = row - torch.logsumexp(row, 0)
            log_prob = log_p[int(item.tokens[prompt + position])]
            sampler, advantage = float(item.sampler_log_probs[position]), float(np.float32(item.advantage))
            ratio = torch.exp(log_prob - sampler)
            bounded = min(max(float(ratio), 1 - low), 1 + high)
            within = float(ratio) == bounded
            plain, clipped = -ratio * advantage, (-ratio if within else -torch.tensor(bounded)) * advantage
            token_loss = plain if float(plain.detach()) >= float(clipped.detach()) else clipped
            if advantage < 0 and float(token_loss.detach()) > -dual * advantage:
                token_loss = torch.tensor(-dual * advantage, dtype=torch.float64)
            loss = loss + weight * token_loss
            metrics["pg_clipfrac"] += weight * float(clipped.detach() > plain.detach())
            metrics["ppo_kl"] += weight * (sampler - float(log_prob.detach()))
            metrics["ois"] += weight * float(ratio.detach())
            metrics["entropy_loss"] += weight * -float((log_p.exp() * log_p).sum().detach())
            metrics["train_rollout_logprob_abs_diff"] += weight * abs(sampler - float(log_prob.detach()))
    model.zero_grad()
    loss.backward()
    return {**metrics, "loss": float(loss.detach())}
