"""The step's objective on one microbatch: policy term, its corrections, entropy and KL, in this order."""

from __future__ import annotations

import torch

from vime.algorithms.aggregate import token_weights, weighted_sum, weighted_sums
from vime.algorithms.importance import WeightKind, importance_weights
from vime.algorithms.kl import kl_terms
from vime.algorithms.loss_tokens import LossTokens
from vime.algorithms.objective_config import Estimator, ObjectiveConfig, Weighting
from vime.algorithms.policy_loss import (
    PolicyLoss,
    PolicyObjective,
    kept_by_sequence_mask,
    policy_loss,
    sequence_ppo_kl,
    token_ppo_kl,
)
from vime.algorithms.ragged import Reduce, on_one_rank, pieces, sequence_sums
from vime.algorithms.score_centering import CenteringTerms
from vime.data.batch import StepTotals
from vime.errors import TrainerError


class MicrobatchObjective:
    """Loss and metrics of one microbatch, both already divided by the denominators of the whole step.

    The order is fixed: objective, off-policy sequence mask, importance weight, score centering, reduction, entropy,
    KL. Tokens whose mask is zero enter as zeros, so that nothing that they hold reaches loss or gradient.
    """

    def __init__(
        self,
        config: ObjectiveConfig,
        totals: StepTotals,
        tokens: LossTokens,
        log_probs: torch.Tensor,
        entropies: torch.Tensor,
        *,
        centering: CenteringTerms | None = None,
        sum_over_context: Reduce = on_one_rank,
    ) -> None:
        """Take log-probabilities and entropies [R] of the current policy, both differentiable.

        `centering` are the terms of score centering, None without it; `sum_over_context` sums over the ranks that
        hold parts of the same sequences.
        """
        self._config, self._totals, self._tokens, self._reduce = config, totals, tokens, sum_over_context
        self._mask = tokens.loss_mask
        self._log_probs = self._trained(log_probs)
        self._current = self._log_probs.detach()
        self._entropies = self._trained(entropies)
        self._sampler = self._trained(tokens.sampler_log_probs)
        self._advantages = self._trained(tokens.advantages)
        self._centering = centering
        stored = None if tokens.old_log_probs is None else self._trained(tokens.old_log_probs)
        self._stored = self._current if stored is None else stored
        self._old = self._sampler if config.use_rollout_logprobs else self._stored
        self._weights = self._weights_of(self._mask)
        self.sample_losses: torch.Tensor | None = None
        """[S] each sequence's part of the loss, of this rank's tokens, once it is computed; detached. None where a
        reducer of the user's own makes one number of all tokens."""

    def loss_and_metrics(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(loss, metrics by name), scalars; the metrics are detached."""
        config = self._config
        ppo_kl = self._ppo_kl()
        policy = policy_loss(self._log_probs, ppo_kl, self._advantages, config.policy)
        term, metrics = self._without_drifted(policy.loss)
        term, mask, more = self._weighted(term)
        metrics |= more
        term, more = self._centered(term)
        metrics |= more
        weights = self._weights if mask is self._mask else self._weights_of(mask)
        pg_loss = self._reduced(term, mask, weights)
        entropy_loss = weighted_sum(self._entropies, weights)
        loss = pg_loss
        per_token = term.detach()
        if config.entropy_coef:
            loss = loss - config.entropy_coef * entropy_loss
            per_token = per_token - config.entropy_coef * self._entropies.detach()
        if config.use_kl_loss:
            kl = self._kl_terms()
            kl_loss = weighted_sum(kl, weights)
            loss = loss + config.kl_loss_coef * kl_loss
            metrics["kl_loss"] = kl_loss
            per_token = per_token + config.kl_loss_coef * kl.detach()
        if config.reducer is None:
            self.sample_losses = weighted_sums(per_token, weights, self._tokens.response_lengths)
        metrics |= {"loss": loss, "pg_loss": pg_loss, "entropy_loss": entropy_loss}
        metrics |= self._comparisons(policy, ppo_kl, weights)
        if self._tokens.old_entropies is not None:
            metrics["rollout_entropy"] = weighted_sum(self._trained(self._tokens.old_entropies), self._weights)
        if config.kl_coef:
            metrics["reward_kl"] = weighted_sum(self._reward_kl(), self._weights)
        if config.opd_kl_coef is not None and self._tokens.teacher_log_probs is not None:
            reverse_kl = self._old - self._trained(self._tokens.teacher_log_probs)
            metrics["opd_reverse_kl"] = weighted_sum(reverse_kl, self._weights)
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _trained(self, values: torch.Tensor) -> torch.Tensor:
        return values.where(self._mask, 0.0)

    def _weights_of(self, mask: torch.Tensor) -> torch.Tensor:
        return token_weights(
            mask,
            self._tokens.response_lengths,
            self._tokens.mask_sums,
            self._totals,
            per_token=self._config.calculate_per_token_loss,
        )

    def _ppo_kl(self) -> torch.Tensor:
        if self._config.estimator is Estimator.GSPO:
            lengths = self._tokens.response_lengths
            return sequence_ppo_kl(self._log_probs, self._old, self._mask, lengths, self._reduce)
        return token_ppo_kl(self._log_probs, self._old)

    def _without_drifted(self, term: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Apply the off-policy sequence mask."""
        if self._config.opsm_delta is None:
            return term, {}
        lengths = self._tokens.response_lengths
        kept = kept_by_sequence_mask(
            self._log_probs,
            self._old,
            self._advantages,
            self._mask,
            lengths,
            delta=self._config.opsm_delta,
            reduce=self._reduce,
        )
        trained = self._reduce(sequence_sums(self._mask.float(), lengths)).clamp(min=1.0)
        dropped = (sequence_sums((~kept).float(), lengths) / trained).sum()
        return term.where(kept, 0.0), {"opsm_clipfrac": dropped / max(self._totals.num_rollouts, 1)}

    def _weighted(self, term: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Apply importance weights; returns (term, loss mask, metrics)."""
        config = self._config
        is_reinforce = config.policy.objective is PolicyObjective.REINFORCE
        train = self._current if is_reinforce else self._stored
        if config.weighting is not None:
            weighted, mask, per_token = self._call_weighting(config.weighting, term, train)
        elif config.weight_rule.kind is not WeightKind.NONE:
            weights = importance_weights(train, self._sampler, config.weight_rule)
            weighted, mask, per_token = term * weights.weights, self._mask, weights.metrics()
        else:
            return term, self._mask, {}
        # Reduced over the original mask: over the changed one a share of dropped tokens would always be zero.
        metrics = {name: weighted_sum(values, self._weights) for name, values in per_token.items()}
        return (term, self._mask, metrics) if config.mismatch_metrics_only else (weighted, mask, metrics)

    def _call_weighting(
        self, weighting: Weighting, term: torch.Tensor, train: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        lengths = self._tokens.response_lengths.tolist()
        weighted, masks, metrics = weighting(
            args=self._config.hook_args,
            pg_loss=term,
            train_log_probs=pieces(train, lengths),
            rollout_log_probs=pieces(self._sampler, lengths),
            loss_masks=pieces(self._mask.float(), lengths),
            total_lengths=self._tokens.total_lengths.tolist(),
            response_lengths=lengths,
        )
        mask = torch.cat(list(masks)) if len(masks) else self._mask
        wrong = {name: value.shape for name, value in {"pg_loss": weighted, "masks": mask, **metrics}.items()
                 if value.shape != self._mask.shape}  # fmt: skip
        if wrong:
            name, shape = next(iter(wrong.items()))
            raise TrainerError(
                f"--custom-tis-function-path returned {name} of shape {list(shape)}, "
                f"allowed: {list(self._mask.shape)}, one value for each response token.",
                next_step="Correct the function.",
            )
        return weighted, mask * self._mask, metrics

    def _centered(self, term: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Add the correction of score centering; it is weighted by the same rule inside and never a second time."""
        if self._centering is None:
            return term, {}
        correction = self._trained(self._centering.correction)
        weight = importance_weights(self._current, self._sampler, self._config.weight_rule).weights
        reported = {
            "sc_correction": correction,
            "sc_sampler_head_mass": self._centering.sampler_head_mass,
            "sc_train_head_mass": self._centering.train_head_mass,
            "sc_importance_weight": weight,
        }
        metrics = {name: weighted_sum(values, self._weights) for name, values in reported.items()}
        return term + self._advantages * correction, metrics

    def _reduced(self, term: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The policy loss as one number."""
        if self._config.reducer is None:
            return weighted_sum(term, weights)
        lengths = self._tokens.response_lengths.tolist()
        reducer = self._config.reducer(
            self._tokens.total_lengths.tolist(),
            lengths,
            pieces(mask.float(), lengths),
            self._config.calculate_per_token_loss,
        )
        return reducer(term) / self._denominator

    @property
    def _denominator(self) -> int:
        totals = self._totals
        return max(totals.num_trained_tokens if self._config.calculate_per_token_loss else totals.num_rollouts, 1)

    def _kl_terms(self) -> torch.Tensor:
        ratio = (self._log_probs - self._old).exp() if self._config.use_unbiased_kl else None
        return kl_terms(self._log_probs, self._reference(), self._config.kl_kind, importance_ratio=ratio)

    def _reward_kl(self) -> torch.Tensor:
        """What the rewards were penalised by, before its coefficient."""
        return kl_terms(self._old, self._reference(), self._config.kl_kind)

    def _reference(self) -> torch.Tensor:
        """[R] log-probabilities under the reference model."""
        if self._tokens.reference_log_probs is None:
            raise TrainerError(
                "the KL to the reference model is asked for, but the batch has no reference log-probabilities.",
                next_step="Give --ref-load, or leave out --kl-coef and --use-kl-loss.",
            )
        return self._trained(self._tokens.reference_log_probs)

    def _comparisons(self, policy: PolicyLoss, ppo_kl: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """Metrics that compare the current policy with the old one and with the sampler."""
        of_current = self._config.use_rollout_logprobs or self._centering is not None
        compared = self._current if of_current else self._old
        return {
            "pg_clipfrac": weighted_sum(policy.clipped, weights),
            "ppo_kl": weighted_sum(ppo_kl, weights),
            "ois": weighted_sum(policy.ratio, self._weights),
            "train_rollout_logprob_abs_diff": weighted_sum((self._sampler - compared).abs(), self._weights),
        }
