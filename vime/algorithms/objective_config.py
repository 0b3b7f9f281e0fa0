"""What the optimizer minimises, as plain settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from vime.algorithms.importance import WeightKind, WeightRule
from vime.algorithms.kl import KlKind
from vime.algorithms.policy_loss import PolicyLossSettings
from vime.errors import SettingsError


class Estimator(Enum):
    """How advantages come from rewards; --advantage-estimator."""

    GRPO = "grpo"
    GSPO = "gspo"
    CISPO = "cispo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    PPO = "ppo"


class LossKind(Enum):
    """What is minimised; --loss-type."""

    POLICY = "policy_loss"
    SUPERVISED = "sft_loss"
    CUSTOM = "custom_loss"


Weighting = Callable[..., tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]]
"""A function as --custom-tis-function-path documents it: keyword arguments args, pg_loss [R], and lists over the
sequences train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths; returns the weighted loss
[R], loss masks that may drop tokens, and metrics [R] by name."""

ReducerFactory = Callable[[list[int], list[int], list[torch.Tensor], bool], Callable[[torch.Tensor], torch.Tensor]]
"""A function as --custom-pg-loss-reducer-function-path documents it: (total lengths, response lengths, loss masks,
per token) to a function that makes one number of the policy loss [R]. The number is divided by the rollouts of the
step, or by its trained tokens when `per token` is true."""

CustomLoss = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""A function as --custom-loss-function-path names it; see `vime.algorithms.custom_loss`."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What the optimizer minimises, and where the old policy's log-probabilities come from."""

    loss_kind: LossKind = LossKind.POLICY
    custom_loss: CustomLoss | None = None
    """The user's own loss, of `LossKind.CUSTOM`."""
    computes_advantages: bool = True
    """False leaves them to nobody: a custom loss has no use for them."""
    recomputes_loss: bool = False
    """Compute the loss of each microbatch again in the backward pass, and keep nothing of it until then."""
    scores_entropy: bool = False
    """Compute entropies together with old log-probabilities."""
    estimator: Estimator = Estimator.GRPO
    policy: PolicyLossSettings = field(default_factory=PolicyLossSettings)
    calculate_per_token_loss: bool = False
    """False: mean over rollouts of each rollout's token mean. True: mean over all trained tokens of the step."""
    use_rollout_logprobs: bool = True
    """True: the old policy is the sampler. False: it is the policy before the batch's first step."""
    entropy_coef: float = 0.0
    use_kl_loss: bool = False
    """Report the KL to the reference policy, and add it to the loss with `kl_loss_coef`."""
    kl_loss_coef: float = 0.0
    kl_kind: KlKind = KlKind.K1
    use_unbiased_kl: bool = False
    weight_rule: WeightRule = field(default_factory=WeightRule)
    """Built-in importance weight of each token."""
    weighting: Weighting | None = None
    """The user's own, in place of `weight_rule`."""
    mismatch_metrics_only: bool = False
    """Report what the weighting says, but don't apply it."""
    centers_scores: bool = False
    """Subtract the sampler's expected score, weighted by `weight_rule` (arXiv 2609.20807)."""
    opsm_delta: float | None = None
    """Off-policy sequence masking above this drift; None turns it off."""
    reducer: ReducerFactory | None = None
    """The user's own reduction of the policy loss."""
    kl_coef: float = 0.0
    """Weight of the KL penalty in the rewards."""
    gamma: float = 1.0
    lambd: float = 1.0
    opd_kl_coef: float | None = None
    """On-policy distillation: weight of the reverse KL to the teacher in the advantages; None turns it off."""
    normalize_advantages: bool = False
    custom_advantages: Callable[[Any, dict[str, Any]], None] | None = None
    """A function as --custom-advantage-function-path documents it."""
    hook_args: Any = None
    """Flat view of the settings for the user's functions."""

    def __post_init__(self) -> None:
        if (self.loss_kind is LossKind.CUSTOM) != (self.custom_loss is not None):
            raise SettingsError("a custom loss needs the kind of loss and the function, allowed: both or neither.")
        if self.weighting is not None and self.weight_rule.kind is not WeightKind.NONE:
            raise SettingsError("weight_rule and weighting are both given, allowed: one of them.")

    @property
    def needs_reference(self) -> bool:
        """Whether the KL to a reference model is penalised or reported."""
        return self.loss_kind is not LossKind.SUPERVISED and (self.kl_coef != 0.0 or self.use_kl_loss)

    @property
    def has_token_advantages(self) -> bool:
        """Whether advantages need more than the plan's normalised reward of each sequence."""
        if self.loss_kind is LossKind.SUPERVISED or not self.computes_advantages:
            return False
        group_relative = self.estimator in (Estimator.GRPO, Estimator.GSPO, Estimator.CISPO)
        changed = self.normalize_advantages or self.custom_advantages is not None or self.opd_kl_coef is not None
        return changed or not group_relative

    def recomputes_old_log_probs(self, num_steps: int) -> bool:
        """Whether the old policy's log-probabilities need a forward pass before the batch's first of `num_steps`."""
        if self.loss_kind is LossKind.SUPERVISED:
            return False
        if self.scores_entropy:
            return True
        if self.use_rollout_logprobs:
            return self.mismatch_metrics_only
        reuses_own = (
            num_steps == 1
            and self.loss_kind is LossKind.POLICY
            and self.kl_coef == 0.0
            and self.opd_kl_coef is None
            and not self.mismatch_metrics_only
            and self.estimator not in (Estimator.GSPO, Estimator.PPO)
        )
        return not reuses_own
