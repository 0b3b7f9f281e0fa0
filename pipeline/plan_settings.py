"""From flags to what a batch plan depends on."""

from __future__ import annotations

from pipeline.packing import PackingSettings
from pipeline.planner import PlanSettings
from vime.settings.groups import Settings


def plan_settings(settings: Settings, packing: PackingSettings, num_groups: int | None = None) -> PlanSettings:
    """For batches of `num_groups` groups, --rollout-batch-size of them when left out."""
    data, objective = settings.data, settings.objective
    return PlanSettings(
        rollout_batch_size=(data.rollout_batch_size or 0) if num_groups is None else num_groups,
        rollouts_per_step=data.samples_per_step,
        packing=packing,
        normalize_rewards=objective.centers_rewards,
        normalize_std=objective.divides_by_std,
    )
