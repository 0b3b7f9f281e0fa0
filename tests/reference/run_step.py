"""One step through the product, and the same through the dense reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.reference.dense_objective import Options, step_objective
from tests.reference.ragged_batches import Sequence_, flat, tokens, totals
from vime.algorithms.importance import WeightKind, WeightRule
from vime.algorithms.kl import KlKind
from vime.algorithms.objective import MicrobatchObjective
from vime.algorithms.objective_config import Estimator, ObjectiveConfig
from vime.algorithms.policy_loss import PolicyLossSettings, PolicyObjective
from vime.algorithms.score_centering import CenteringTerms

LEAVES = ("log_probs", "entropies", "corrections")
"""Arrays of a sequence that the loss is differentiated by."""


def config_of(options: Options, **more: Any) -> ObjectiveConfig:
    return ObjectiveConfig(
        estimator=Estimator.GSPO if options.sequence_ratio else Estimator.GRPO,
        policy=PolicyLossSettings(PolicyObjective(options.objective), options.eps, options.eps_high, options.dual),
        calculate_per_token_loss=options.per_token,
        use_rollout_logprobs=options.old_is_sampler,
        entropy_coef=options.entropy_coef,
        use_kl_loss=options.kl_kind is not None,
        kl_loss_coef=options.kl_coef,
        kl_coef=0.0 if options.reward_kl is None else 0.1,
        kl_kind=KlKind(options.kl_kind or options.reward_kl or "k1"),
        use_unbiased_kl=options.unbiased,
        weight_rule=WeightRule(WeightKind(options.weight), options.low, options.high),
        opsm_delta=options.opsm_delta,
        opd_kl_coef=1.0 if options.opd else None,
        **more,
    )


def product(
    step: Sequence[Sequence_], split: Sequence[Sequence[int]], options: Options, **more: Any
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """(metrics summed over the microbatches of `split`, gradients of each leaf [R] in the order of the step)."""
    metrics: dict[str, float] = {}
    gradients = {name: [torch.zeros(item.length) for item in step] for name in LEAVES}
    for members in split:
        chosen = [step[member] for member in members]
        leaves = {name: flat(chosen, name).requires_grad_() for name in LEAVES}
        masses = torch.ones(len(leaves["corrections"]))
        loss, found = MicrobatchObjective(
            config_of(options, **more),
            totals(step),
            tokens(step, members, stored=options.old_is_stored),
            leaves["log_probs"],
            leaves["entropies"],
            centering=CenteringTerms(leaves["corrections"], masses, masses) if options.centered else None,
        ).loss_and_metrics()
        loss.backward()
        for name, value in found.items():
            metrics[name] = metrics.get(name, 0.0) + value.item()
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                parts = torch.split(leaf.grad, [item.length for item in chosen])
                for member, part in zip(members, parts, strict=True):
                    gradients[name][member] = part
    return metrics, {name: torch.cat(parts) for name, parts in gradients.items()}


def reference(step: Sequence[Sequence_], options: Options) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The same from the dense reference."""
    leaves = [
        {
            name: [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in getattr(item, name)]
            for name in LEAVES
        }
        for item in step
    ]
    loss, metrics = step_objective(step, leaves, options)
    loss.backward()
    slopes = {
        name: [0.0 if value.grad is None else value.grad.item() for leaf in leaves for value in leaf[name]]
        for name in LEAVES
    }
    return metrics, slopes
