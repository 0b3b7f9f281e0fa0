"""Rules on the KL to a reference model."""

from __future__ import annotations

from collections.abc import Iterator

from vime.settings.groups import Settings
from vime.settings.groups.objective import GROUP_RELATIVE
from vime.settings.rules.problem import Problem, problem
from vime.settings.rules.quantities import uses_reference_model


def kl_is_penalised_once(settings: Settings) -> Iterator[Problem]:
    """In the rewards or in the loss; both would count it twice."""
    objective = settings.objective
    if objective.kl_coef != 0 and objective.kl_loss_coef != 0:
        yield problem(
            settings,
            "--kl-coef --kl-loss-coef",
            allowed="one of them",
            reason="One penalises the KL in the rewards, the other in the loss.",
            next_step="Leave out one of the two.",
        )


def kl_has_a_reference(settings: Settings) -> Iterator[Problem]:
    """The KL is measured against a model that has to be loaded."""
    if not uses_reference_model(settings) or settings.checkpoint.ref_load is not None:
        return
    flag = "--use-kl-loss" if settings.objective.use_kl_loss else "--kl-coef"
    yield problem(
        settings,
        f"{flag} --ref-load",
        allowed="both",
        reason="The KL is measured against the reference model.",
        next_step="Give --ref-load DIR.",
    )


def kl_in_rewards_reaches_the_advantages(settings: Settings) -> Iterator[Problem]:
    """Group-relative advantages are made of rewards alone; the reference computes the KL there and drops it."""
    objective = settings.objective
    if (
        objective.kl_coef != 0
        and objective.advantage_estimator in GROUP_RELATIVE
        and objective.custom_advantage_function_path is None
    ):
        yield problem(
            settings,
            "--kl-coef --advantage-estimator",
            allowed="0, or reinforce_plus_plus, reinforce_plus_plus_baseline, ppo",
            reason="Group-relative advantages are made of rewards alone, so the penalty would have no effect.",
            next_step="Give --use-kl-loss with --kl-loss-coef instead.",
        )


def kl_loss_settings_have_a_kl_loss(settings: Settings) -> Iterator[Problem]:
    """Without --use-kl-loss these would be ignored."""
    objective = settings.objective
    unused = {
        "--kl-loss-coef": objective.kl_loss_coef != 0,
        "--use-unbiased-kl": objective.use_unbiased_kl,
        "--kl-loss-type": objective.kl_loss_type != "k1" and not uses_reference_model(settings),
    }
    for flag, is_given in unused.items():
        if is_given and not objective.use_kl_loss:
            yield problem(
                settings,
                f"{flag} --use-kl-loss",
                allowed="both",
                reason="There is no KL term in the loss.",
                next_step=f"Give --use-kl-loss, or leave out {flag}.",
            )


def reference_settings_have_a_reference(settings: Settings) -> Iterator[Problem]:
    """Step and update interval of a model that isn't loaded."""
    checkpoint = settings.checkpoint
    given = {"--ref-ckpt-step": checkpoint.ref_ckpt_step, "--ref-update-interval": checkpoint.ref_update_interval}
    for flag, value in given.items():
        if value is not None and checkpoint.ref_load is None:
            yield problem(
                settings,
                f"{flag} --ref-load",
                allowed="both",
                reason="No reference model is loaded.",
                next_step=f"Give --ref-load DIR, or leave out {flag}.",
            )


RULES = (
    kl_is_penalised_once,
    kl_has_a_reference,
    kl_in_rewards_reaches_the_advantages,
    kl_loss_settings_have_a_kl_loss,
    reference_settings_have_a_reference,
)
