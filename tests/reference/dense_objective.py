"""The objective of a whole step in float64, token by token in plain loops, from the papers' formulas.

Everything here is a Python number or a scalar tensor; nothing is packed and nothing is shared with the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Scalar = torch.Tensor


def number(value: Scalar) -> float:
    return float(value.detach())


@dataclass(frozen=True)
class Options:
    """What is minimised, in the words of the flags."""

    objective: str = "ppo"
    sequence_ratio: bool = False
    eps: float = 0.2
    eps_high: float | None = None
    dual: float | None = None
    old_is_sampler: bool = False
    old_is_stored: bool = True
    weight: str = "none"
    low: float = 0.0
    high: float = 2.0
    opsm_delta: float | None = None
    centered: bool = False
    entropy_coef: float = 0.0
    kl_kind: str | None = None
    kl_coef: float = 0.0
    unbiased: bool = False
    reward_kl: str | None = None
    per_token: bool = False
    opd: bool = False


def weight_of(ratio: float, options: Options) -> float:
    """f(ratio)."""
    if options.weight == "none":
        return 1.0
    if options.weight == "tis":
        return min(max(ratio, options.low), options.high)
    return ratio if options.low <= ratio <= options.high else 0.0


def kl_of(log_prob: Scalar, base: Scalar | float, kind: str, ratio: Scalar | None) -> Scalar:
    """One KL estimate; low_var_kl is k3 in [-10, 10]."""
    d = log_prob - base
    value = {"k1": d, "k2": d * d / 2}.get(kind, torch.exp(-d) - 1 + d)
    if ratio is not None:
        value = ratio * value
    if kind == "low_var_kl" and abs(number(value)) > 10:
        value = torch.tensor(10.0 if number(value) > 0 else -10.0, dtype=torch.float64)
    return value


def objective_of(log_prob: Scalar, ppo_kl: Scalar, advantage: float, options: Options) -> tuple[Scalar, float]:
    """(loss, clipped) of one token."""
    if options.objective == "reinforce":
        return -advantage * log_prob, 0.0
    ratio = torch.exp(-ppo_kl)
    low, high = 1 - options.eps, 1 + (options.eps if options.eps_high is None else options.eps_high)
    inside = low <= number(ratio) <= high
    bounded = ratio if inside else torch.tensor(low if number(ratio) < low else high, dtype=torch.float64)
    if options.objective == "cispo":
        return -number(bounded) * advantage * log_prob, float(not inside)
    plain, clipped = -ratio * advantage, -bounded * advantage
    loss = plain if number(plain) >= number(clipped) else clipped
    if options.dual is not None and advantage < 0 and number(loss) > -options.dual * advantage:
        loss = torch.tensor(-options.dual * advantage, dtype=torch.float64)
    return loss, float(number(clipped) > number(plain))


def step_objective(
    sequences: Sequence[Any], leaves: Sequence[dict[str, list[Scalar]]], options: Options
) -> tuple[Scalar, dict[str, float]]:
    """(loss, metrics) of the step.

    `leaves` hold for each sequence the differentiable scalars "log_probs", "entropies" and "corrections" of its tokens.
    """
    rollouts = sorted({item.rollout for item in sequences})
    trained_of = {number: sum(sum(s.mask) for s in sequences if s.rollout == number) for number in rollouts}
    all_tokens = sum(max(sum(item.mask), 1) for item in sequences)
    loss = torch.zeros((), dtype=torch.float64)
    metrics: dict[str, float] = {}

    def report(name: str, value: float) -> None:
        metrics[name] = metrics.get(name, 0.0) + value

    for item, leaf in zip(sequences, leaves, strict=True):
        trained = [position for position in range(item.length) if item.mask[position]]
        log_probs = leaf["log_probs"]
        stored = item.old if options.old_is_stored else [number(value) for value in log_probs]
        old = item.sampler if options.old_is_sampler else stored
        mean_kl = sum((old[t] - log_probs[t] for t in trained), torch.zeros((), dtype=torch.float64))
        mean_kl = mean_kl / max(len(trained), 1)
        dropped = 0
        for t in trained:
            share = 1 / all_tokens if options.per_token else 1 / (len(rollouts) * max(trained_of[item.rollout], 1))
            advantage, log_prob = item.advantages[t], log_probs[t]
            ppo_kl = mean_kl if options.sequence_ratio else old[t] - log_prob
            term, clipped = objective_of(log_prob, ppo_kl, advantage, options)
            if options.opsm_delta is not None and advantage < 0 and number(mean_kl) > options.opsm_delta:
                term, dropped = 0.0 * log_prob, dropped + 1
            train = number(log_prob) if options.objective == "reinforce" else stored[t]
            rho = float(torch.exp(torch.tensor(train - item.sampler[t], dtype=torch.float64)))
            if options.weight != "none":
                weight = weight_of(rho, options)
                term = term * weight
                report("tis", share * rho)
                report("tis_clipfrac", share * float(weight != rho))
                report("tis_abs", share * abs(rho - 1))
            if options.centered:
                current = number(torch.exp(log_prob - item.sampler[t]))
                term = term + advantage * leaf["corrections"][t]
                report("sc_correction", share * number(leaf["corrections"][t]))
                report("sc_importance_weight", share * weight_of(current, options))
            report("pg_loss", share * number(term))
            token_loss = term - options.entropy_coef * leaf["entropies"][t]
            if options.kl_kind is not None:
                ratio = torch.exp(log_prob - old[t]) if options.unbiased else None
                kl = kl_of(log_prob, item.reference[t], options.kl_kind, ratio)
                token_loss = token_loss + options.kl_coef * kl
                report("kl_loss", share * number(kl))
            loss = loss + share * token_loss
            compared = number(log_prob) if options.old_is_sampler or options.centered else old[t]
            if options.reward_kl is not None:
                base = torch.tensor(old[t], dtype=torch.float64)
                report("reward_kl", share * number(kl_of(base, item.reference[t], options.reward_kl, None)))
            if options.opd:
                report("opd_reverse_kl", share * (old[t] - item.teacher[t]))
            report("entropy_loss", share * number(leaf["entropies"][t]))
            report("pg_clipfrac", share * clipped)
            report("ppo_kl", share * number(ppo_kl))
            report("ois", share * number(torch.exp(-ppo_kl)))
            report("train_rollout_logprob_abs_diff", share * abs(item.sampler[t] - compared))
        if options.opsm_delta is not None:
            report("opsm_clipfrac", dropped / max(len(trained), 1) / len(rollouts))
    report("loss", number(loss))
    return loss, metrics
