"""Advice: settings that work, but hardly as meant. Printed, never refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vime.settings.groups import Settings
from vime.settings.groups.objective import GROUP_RELATIVE, ObjectiveSettings

_Condition = Callable[[ObjectiveSettings], bool]
WITHOUT_EFFECT: dict[str, tuple[_Condition, str]] = {
    "--gamma": (
        lambda objective: objective.gamma != 1 and objective.advantage_estimator not in ("reinforce_plus_plus", "ppo"),
        "--advantage-estimator reinforce_plus_plus or ppo",
    ),
    "--tis-clip": (lambda objective: objective.tis_clip != 2 and not _weighs(objective), "--use-tis"),
    "--tis-clip-low": (lambda objective: objective.tis_clip_low != 0 and not _weighs(objective), "--use-tis"),
    "--opsm-delta": (lambda objective: objective.opsm_delta != 1e-4 and not objective.use_opsm, "--use-opsm"),
}
"""Flag -> when it is given in vain, and what would read it."""


def _weighs(objective: ObjectiveSettings) -> bool:
    return objective.use_tis or objective.get_mismatch_metrics


def advice(settings: Settings) -> Iterator[str]:
    """One sentence or two for each."""
    data, objective, trainer = settings.data, settings.objective, settings.trainer
    grouped = objective.advantage_estimator in (*GROUP_RELATIVE, "reinforce_plus_plus_baseline")
    own = settings.rollout.custom_reward_post_process_path or objective.custom_advantage_function_path
    if grouped and data.n_samples_per_prompt == 1 and objective.centers_rewards and not own:
        yield (
            f"--n-samples-per-prompt is 1 with --advantage-estimator {objective.advantage_estimator}: a reward minus "
            "the mean of its group is always 0, so the policy loss trains nothing. Give 2 or more."
        )
    if objective.advantage_estimator == "cispo" and objective.eps_clip < 1:
        yield (
            f"--eps-clip is {objective.eps_clip} with --advantage-estimator cispo, which is meant to have no lower "
            "clip. Give --eps-clip 1."
        )
    for flag, (is_vain, reader) in WITHOUT_EFFECT.items():
        if is_vain(objective):
            yield f"{flag} has no effect without {reader}."
    if settings.rollout.custom_rm_path is not None and settings.rollout.rm_type is not None:
        yield f"--rm-type {settings.rollout.rm_type} has no effect with --custom-rm-path, which goes before it."
    if data.num_epoch is not None and data.num_rollout is not None:
        yield f"--num-epoch {data.num_epoch} has no effect with --num-rollout {data.num_rollout}, which says the end."
    engine = settings.engine
    for flag, value in (
        ("--rollout-health-check-interval", engine.rollout_health_check_interval),
        ("--rollout-health-check-timeout", engine.rollout_health_check_timeout),
        ("--rollout-health-check-first-wait", engine.rollout_health_check_first_wait),
    ):
        if value != 600 and not engine.use_fault_tolerance:
            yield f"{flag} has no effect without --use-fault-tolerance."
    if settings.queue.rollout_session_timeout != 600 and settings.queue.rollout_session_id is None:
        yield "--rollout-session-timeout has no effect without --rollout-session-id."
    if trainer.mtp_loss_scaling_factor != 0.2 and trainer.mtp_num_layers is None:
        yield "--mtp-loss-scaling-factor has no effect without --mtp-num-layers."
    if trainer.use_dynamic_batch_size and trainer.micro_batch_size != 1:
        yield f"--micro-batch-size {trainer.micro_batch_size} has no effect with --use-dynamic-batch-size."
    if objective.use_score_centering and settings.rollout.rollout_top_p < 1 and objective.score_centering_top_k != 128:
        yield (
            f"--score-centering-top-k {objective.score_centering_top_k} has no effect with --rollout-top-p below 1: "
            "the correction sums over the whole nucleus."
        )
