"""From settings to the trainer's objective, with the user's functions loaded."""

from __future__ import annotations

from pipeline.user_functions import user_function
from vime.algorithms.importance import WeightKind, WeightRule
from vime.algorithms.kl import KlKind
from vime.algorithms.objective_config import Estimator, LossKind, ObjectiveConfig
from vime.algorithms.policy_loss import PolicyLossSettings, PolicyObjective
from vime.settings.groups import Settings
from vime.settings.parse import HookArgs
from vime.settings.rules.score_centering import ICEPOP, VANILLA_TIS

BUILT_IN_WEIGHTS = {None: WeightKind.TIS, VANILLA_TIS: WeightKind.TIS, ICEPOP: WeightKind.ICEPOP}
"""--custom-tis-function-path -> the rule that vime applies itself."""


def objective_config(settings: Settings) -> ObjectiveConfig:
    """What the settings ask the optimizer to minimise. Raises `SettingsError` for a function that can't be loaded."""
    objective = settings.objective
    weighs = objective.use_tis or objective.get_mismatch_metrics
    kind = BUILT_IN_WEIGHTS.get(objective.custom_tis_function_path) if weighs else WeightKind.NONE
    return ObjectiveConfig(
        loss_kind=LossKind(objective.loss_type),
        custom_loss=user_function("--custom-loss-function-path", objective.custom_loss_function_path),
        computes_advantages=objective.compute_advantages_and_returns,
        recomputes_loss=objective.recompute_loss_function,
        scores_entropy=objective.use_rollout_entropy,
        estimator=Estimator(objective.advantage_estimator),
        policy=PolicyLossSettings(
            PolicyObjective(objective.policy_objective),
            objective.eps_clip,
            objective.eps_clip_high,
            objective.eps_clip_c,
        ),
        calculate_per_token_loss=objective.calculate_per_token_loss,
        use_rollout_logprobs=objective.use_rollout_logprobs,
        entropy_coef=objective.entropy_coef,
        use_kl_loss=objective.use_kl_loss,
        kl_loss_coef=objective.kl_loss_coef,
        kl_kind=KlKind(objective.kl_loss_type),
        use_unbiased_kl=objective.use_unbiased_kl,
        weight_rule=WeightRule(kind or WeightKind.NONE, objective.tis_clip_low, objective.tis_clip),
        weighting=user_function("--custom-tis-function-path", objective.custom_tis_function_path)
        if kind is None
        else None,
        mismatch_metrics_only=objective.get_mismatch_metrics and not objective.use_tis,
        centers_scores=objective.use_score_centering,
        opsm_delta=objective.opsm_delta if objective.use_opsm else None,
        reducer=user_function("--custom-pg-loss-reducer-function-path", objective.custom_pg_loss_reducer_function_path),
        kl_coef=objective.kl_coef,
        gamma=objective.gamma,
        lambd=objective.lambd,
        opd_kl_coef=objective.opd_kl_coef if objective.use_opd else None,
        normalize_advantages=objective.normalize_advantages,
        custom_advantages=user_function("--custom-advantage-function-path", objective.custom_advantage_function_path),
        hook_args=HookArgs(settings),
    )
