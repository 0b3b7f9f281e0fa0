"""Rules on advantages, objective and loss."""

from __future__ import annotations

from collections.abc import Iterator

from vime.settings.groups import Settings
from vime.settings.rules.problem import Problem, problem


def reinforce_plus_plus_is_whitened(settings: Settings) -> Iterator[Problem]:
    """Both variants are defined with advantages whitened over the batch."""
    objective = settings.objective
    if objective.advantage_estimator.startswith("reinforce_plus_plus") and not objective.normalize_advantages:
        yield problem(
            settings,
            "--advantage-estimator --normalize-advantages",
            allowed="both",
            reason="Its advantages are defined as whitened over the batch.",
            next_step="Give --normalize-advantages.",
        )


def estimator_fits_the_objective(settings: Settings) -> Iterator[Problem]:
    """gspo clips a ratio of sequences, which is ppo's objective; cispo is an objective of its own."""
    objective = settings.objective
    allowed = {"gspo": ("ppo",), "cispo": ()}.get(objective.advantage_estimator)
    if allowed is not None and objective.pg_loss_type is not None and objective.pg_loss_type not in allowed:
        yield problem(
            settings,
            "--pg-loss-type --advantage-estimator",
            allowed=", ".join([*allowed, "left out"]),
            reason=f"{objective.advantage_estimator} brings its own objective.",
            next_step="Leave out --pg-loss-type.",
        )


def dual_clip_belongs_to_the_ratio(settings: Settings) -> Iterator[Problem]:
    """reinforce and cispo have no clipped ratio that a dual clip could bound; it would be ignored."""
    found = settings.objective.policy_objective
    if settings.objective.eps_clip_c is not None and found != "ppo":
        yield problem(
            settings,
            "--eps-clip-c --pg-loss-type",
            found=f"--eps-clip-c {settings.objective.eps_clip_c} with the {found} objective",
            allowed="--eps-clip-c with the ppo objective",
            reason=f"The {found} objective has no clipped ratio to bound.",
            next_step="Leave out --eps-clip-c.",
        )


def custom_loss_is_named(settings: Settings) -> Iterator[Problem]:
    """The type and the path of a custom loss go together."""
    objective = settings.objective
    if (objective.loss_type == "custom_loss") != (objective.custom_loss_function_path is not None):
        yield problem(
            settings,
            "--loss-type --custom-loss-function-path",
            allowed="both --loss-type custom_loss and --custom-loss-function-path, or neither",
            reason="One is not used without the other.",
            next_step="Give both or leave out both.",
        )


def policy_loss_has_advantages(settings: Settings) -> Iterator[Problem]:
    """The policy loss multiplies by advantages; leaving them out is for fine-tuning and custom losses."""
    objective = settings.objective
    if objective.loss_type == "policy_loss" and not objective.compute_advantages_and_returns:
        yield problem(
            settings,
            "--disable-compute-advantages-and-returns --loss-type",
            allowed="--loss-type sft_loss or custom_loss",
            reason="The policy loss multiplies by advantages.",
            next_step="Leave out --disable-compute-advantages-and-returns.",
        )


def advantages_are_computed_where_they_are_shaped(settings: Settings) -> Iterator[Problem]:
    """Without advantages there is nothing to whiten, and nobody calls a function that makes them."""
    objective = settings.objective
    if objective.compute_advantages_and_returns or objective.is_supervised:
        return
    given = {
        "--normalize-advantages": objective.normalize_advantages,
        "--custom-advantage-function-path": objective.custom_advantage_function_path is not None,
    }
    for flag, is_given in given.items():
        if is_given:
            yield problem(
                settings,
                f"--disable-compute-advantages-and-returns {flag}",
                allowed="one of them",
                reason="There are no advantages then.",
                next_step=f"Leave out {flag}, or --disable-compute-advantages-and-returns.",
            )


def importance_weights_need_two_policies(settings: Settings) -> Iterator[Problem]:
    """With the sampler's log-probabilities as the old policy, trainer / sampler is 1 before the first step of ppo."""
    objective = settings.objective
    if objective.use_rollout_logprobs and objective.use_tis and objective.policy_objective != "reinforce":
        yield problem(
            settings,
            "--use-tis --use-rollout-logprobs",
            allowed="one of them, or --pg-loss-type reinforce",
            reason="The objective's own ratio then is the ratio of trainer to sampler; TIS would apply it twice.",
            next_step="Leave out --use-tis, or give --pg-loss-type reinforce.",
        )


def importance_bounds_are_ordered(settings: Settings) -> Iterator[Problem]:
    """An empty range would give all tokens the same weight."""
    objective = settings.objective
    if objective.tis_clip_low > objective.tis_clip:
        yield problem(
            settings,
            "--tis-clip-low --tis-clip",
            allowed=f"{objective.tis_clip} or less",
            reason="It is the lower bound of the importance weight.",
            next_step="Lower --tis-clip-low or raise --tis-clip.",
        )


def custom_weighting_is_used(settings: Settings) -> Iterator[Problem]:
    """The function is called only for --use-tis or --get-mismatch-metrics."""
    objective = settings.objective
    used = objective.use_tis or objective.get_mismatch_metrics
    if objective.custom_tis_function_path is not None and not used:
        yield problem(
            settings,
            "--custom-tis-function-path --use-tis",
            allowed="both",
            reason="The function would not be called.",
            next_step="Give --use-tis, or --get-mismatch-metrics to report only.",
        )


def mismatch_metrics_have_a_function(settings: Settings) -> Iterator[Problem]:
    """The metrics are those that the custom weighting returns."""
    objective = settings.objective
    if objective.get_mismatch_metrics and objective.custom_tis_function_path is None:
        yield problem(
            settings,
            "--get-mismatch-metrics --custom-tis-function-path",
            allowed="both",
            reason="The metrics are those that the function returns.",
            next_step="Give --custom-tis-function-path.",
        )


RULES = (
    reinforce_plus_plus_is_whitened,
    estimator_fits_the_objective,
    dual_clip_belongs_to_the_ratio,
    custom_loss_is_named,
    policy_loss_has_advantages,
    advantages_are_computed_where_they_are_shaped,
    importance_weights_need_two_policies,
    importance_bounds_are_ordered,
    custom_weighting_is_used,
    mismatch_metrics_have_a_function,
)
