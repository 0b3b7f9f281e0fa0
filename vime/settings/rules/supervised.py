"""Rules on supervised fine-tuning: records are trained as they are, nothing is generated and nothing rewarded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vime.settings.groups import Settings
from vime.settings.rules.problem import Problem, problem

_Condition = Callable[[Settings], bool]
IGNORED: dict[str, _Condition] = {
    "--kl-coef": lambda settings: settings.objective.kl_coef != 0,
    "--use-kl-loss": lambda settings: settings.objective.use_kl_loss,
    "--entropy-coef": lambda settings: settings.objective.entropy_coef != 0,
    "--use-opd": lambda settings: settings.objective.use_opd,
    "--use-tis": lambda settings: settings.objective.use_tis,
    "--use-opsm": lambda settings: settings.objective.use_opsm,
    "--get-mismatch-metrics": lambda settings: settings.objective.get_mismatch_metrics,
    "--use-rollout-logprobs": lambda settings: settings.objective.use_rollout_logprobs,
    "--use-rollout-entropy": lambda settings: settings.objective.use_rollout_entropy,
    "--use-rollout-routing-replay": lambda settings: settings.objective.use_rollout_routing_replay,
    "--normalize-advantages": lambda settings: settings.objective.normalize_advantages,
    "--custom-advantage-function-path": lambda settings: settings.objective.custom_advantage_function_path is not None,
    "--custom-pg-loss-reducer-function-path": lambda settings: (
        settings.objective.custom_pg_loss_reducer_function_path is not None
    ),
    "--rollout-temperature": lambda settings: settings.rollout.rollout_temperature != 1,
    "--rollout-top-p": lambda settings: settings.rollout.rollout_top_p != 1,
    "--rm-type": lambda settings: settings.rollout.rm_type is not None,
    "--custom-rm-path": lambda settings: settings.rollout.custom_rm_path is not None,
    "--group-rm": lambda settings: settings.rollout.group_rm,
}
"""Flag -> whether it is given. The likelihood of a record has no use for any of them."""


def supervised_loss_stands_alone(settings: Settings) -> Iterator[Problem]:
    """One for each setting of reinforcement learning that would be ignored."""
    if not settings.objective.is_supervised:
        return
    for flag, is_given in IGNORED.items():
        if is_given(settings):
            yield problem(
                settings,
                f"--loss-type {flag}",
                allowed=f"no {flag}",
                reason="Supervised fine-tuning maximises the likelihood of records; there are no rewards, advantages "
                "or samplers.",
                next_step=f"Leave out {flag}.",
            )


def supervised_fine_tuning_starts_no_engine(settings: Settings) -> Iterator[Problem]:
    """Nothing is generated, so an engine would only take up its devices."""
    if settings.objective.is_supervised and settings.cluster.rollout_num_gpus:
        yield problem(
            settings,
            "--rollout-num-gpus --loss-type",
            allowed="0, or left out",
            reason="Records are trained as they are; nothing is generated.",
            next_step="Leave out --rollout-num-gpus.",
        )


def only_records_have_a_chat_format(settings: Settings) -> Iterator[Problem]:
    """Masks of generated samples come from the generation."""
    if settings.data.loss_mask_type != "qwen" and not settings.objective.is_supervised:
        yield problem(
            settings,
            "--loss-mask-type --loss-type",
            allowed="--loss-type sft_loss",
            reason="It says what is trained of a record in supervised fine-tuning.",
            next_step="Leave out --loss-mask-type, or give --loss-type sft_loss.",
        )


RULES = (
    supervised_loss_stands_alone,
    supervised_fine_tuning_starts_no_engine,
    only_records_have_a_chat_format,
)
