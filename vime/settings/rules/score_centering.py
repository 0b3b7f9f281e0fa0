"""Rules on score centering (arXiv 2609.20807): REINFORCE on the distribution that was sampled, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vime.settings.groups import Settings
from vime.settings.machine import Machine
from vime.settings.rules.problem import Problem, problem
from vime.settings.rules.quantities import option

ICEPOP = "vime.backends.megatron_utils.loss.icepop_function"
VANILLA_TIS = "vime.backends.megatron_utils.loss.vanilla_tis_function"
WEIGHTINGS = (ICEPOP, VANILLA_TIS)
"""Importance weights whose rule is known for every candidate of a token, not for the sampled one alone."""

_Condition = Callable[[Settings], bool]
EXCLUDED: dict[str, tuple[_Condition, str, str]] = {
    "--pg-loss-type": (
        lambda settings: settings.objective.pg_loss_type == "ppo",
        "reinforce, or left out",
        "The correction is that of the REINFORCE objective.",
    ),
    "--advantage-estimator": (
        lambda settings: settings.objective.advantage_estimator in ("gspo", "cispo"),
        "any but gspo and cispo",
        "These bring an objective of their own.",
    ),
    "--loss-type": (
        lambda settings: settings.objective.loss_type != "policy_loss",
        "policy_loss",
        "The correction is a term of the policy loss.",
    ),
    "--custom-pg-loss-reducer-function-path": (
        lambda settings: settings.objective.custom_pg_loss_reducer_function_path is not None,
        "left out",
        "The correction must be reduced as the loss is.",
    ),
    "--use-opd": (lambda settings: settings.objective.use_opd, "left out", "A teacher's term is not centered."),
    "--use-opsm": (
        lambda settings: settings.objective.use_opsm,
        "left out",
        "The mask would apply to the sampled token's term alone.",
    ),
    "--get-mismatch-metrics": (
        lambda settings: settings.objective.get_mismatch_metrics,
        "left out",
        "Its log-probabilities are of another forward pass.",
    ),
    "--use-unbiased-kl": (
        lambda settings: settings.objective.use_unbiased_kl,
        "left out",
        "Its ratio is not centered.",
    ),
    "--custom-tis-function-path": (
        lambda settings: settings.objective.custom_tis_function_path not in (None, *WEIGHTINGS),
        ", ".join([*WEIGHTINGS, "left out"]),
        "The weight is needed for every candidate of a token, not for the sampled one alone.",
    ),
    "--rollout-top-k": (
        lambda settings: settings.rollout.rollout_top_k != -1,
        "-1",
        "The candidates are those of the whole vocabulary, or of --rollout-top-p.",
    ),
}


def score_centering_stands_alone(settings: Settings) -> Iterator[Problem]:
    """One row for each setting that the correction is not derived for."""
    if not settings.objective.use_score_centering:
        return
    for flag, (is_excluded, allowed, reason) in EXCLUDED.items():
        if is_excluded(settings):
            yield problem(
                settings,
                f"--use-score-centering {flag}",
                allowed=f"{flag} {allowed}",
                reason=reason,
                next_step=f"Leave out {flag}, or --use-score-centering.",
            )


def engine_returns_as_many_candidates(settings: Settings) -> Iterator[Problem]:
    """The sampled token comes on top of the k candidates."""
    if not settings.objective.use_score_centering or settings.rollout.rollout_top_p != 1:
        return
    needed = settings.objective.score_centering_top_k + 1
    value = option(settings.vllm_args, "--vllm-max-logprobs")
    if value is not None and value.isascii() and value.isdigit() and int(value) < needed:
        yield Problem(
            ("--vllm-max-logprobs", "--score-centering-top-k"),
            f"--vllm-max-logprobs {value} with --score-centering-top-k {needed - 1}",
            f"{needed} or more",
            "The engine returns the sampled token on top of the candidates.",
            "Leave out --vllm-max-logprobs.",
        )


def engine_keeps_processed_logprobs(settings: Settings, machine: Machine) -> Iterator[Problem]:
    """The variable makes engines return log-probabilities from before temperature and top-p."""
    name = "VLLM_RETURN_ORIGINAL_LOGPROB"
    value = machine.environment.get(name, "")
    rollout = settings.rollout
    changed = rollout.rollout_temperature != 1 or rollout.rollout_top_p != 1
    if settings.objective.use_score_centering and changed and value.lower() not in ("", "0", "false"):
        yield problem(
            settings,
            "--use-score-centering --rollout-temperature --rollout-top-p",
            found=f"The environment has {name}={value}, with --use-score-centering, --rollout-temperature "
            f"{rollout.rollout_temperature} and --rollout-top-p {rollout.rollout_top_p}",
            allowed=f"{name} unset",
            reason="Engines would return log-probabilities from before temperature and top-p.",
            next_step=f"Run `unset {name}`.",
        )


RULES = (score_centering_stands_alone, engine_returns_as_many_candidates)
MACHINE_RULES = (engine_keeps_processed_logprobs,)
