"""Settings that a replay changes, and the plans that follow from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pipeline.packing_settings import packing_settings
from pipeline.plan_settings import plan_settings
from pipeline.planner import BatchPlan, ProcessedRewards, plan_batch
from storage.columns import summary_from_header
from storage.pool import Pool
from storage.queue_types import AcceptedGroup
from storage.summary import GroupSummary, with_removed
from vime.errors import SettingsError
from vime.settings.files import read_config
from vime.settings.groups import Settings, all_flags
from vime.settings.passed_on import PassedOn
from vime.settings.rules.quantities import data_parallel_size
from vime.settings.validate import find_problems

_GROUPS = {"checkpoint", "cluster", "data", "objective", "trainer"}
"""Settings that training reads, but for"""
_NOT_READ = {"save", "load", "ckpt_step", "save_interval", "save_hf", "prompt_data"}
_READ_TOO = {"rollout_temperature"}
"""and these of other groups."""


def changed_settings(settings: Settings, flag: str, path: str) -> Settings:
    """The settings with the values of the settings file that `flag` named (the format of --config).

    Raises `SettingsError` for a file that can't be read, a value that a replay doesn't use, or one that can't work.
    """
    values, passed_on = read_config(path, flag=flag)
    for field in values:
        group, described = all_flags()[field]
        if field not in _READ_TOO and (group not in _GROUPS or field in _NOT_READ):
            raise SettingsError(
                f"{path}: {group}.{field} has no effect on a rollout that is stored.",
                next_step=f"Leave it out; {described.name} is of use to `vime train`.",
            )
    changed = _with_values(settings, values, passed_on)
    before = {str(problem) for problem in find_problems(settings)}
    for problem in find_problems(changed):
        if str(problem) not in before:
            raise SettingsError(f"{path}: {problem}", next_step=problem.next_step)
    return changed


def plan_for(plan: BatchPlan, pool: Pool, planned: Settings, wanted: Settings) -> BatchPlan:
    """The plan of the same groups under `wanted`, which is `plan` itself where the settings say the same.

    Advantages stay what they were unless the normalisation of rewards changes. Raises as `plan_batch`.
    """
    num_groups = len(plan.groups)
    packed_for = packing_settings(planned, len(plan.steps[0].ranks))
    before = plan_settings(planned, packed_for, num_groups)
    after = plan_settings(wanted, packing_settings(wanted, data_parallel_size(wanted)), num_groups)
    if before == after:
        return plan
    groups = [
        AcceptedGroup(group.position, group.group_index, group.ref, _summary(plan, number, pool))
        for number, group in enumerate(plan.groups)
    ]
    same_rewards = (before.normalize_rewards, before.normalize_std) == (after.normalize_rewards, after.normalize_std)
    return plan_batch(
        groups,
        after,
        branch=plan.branch,
        rollout_id=plan.rollout_id,
        policy_version=plan.policy_version,
        processed=_rewards_of(plan) if same_rewards else None,
    )


def _summary(plan: BatchPlan, number: int, pool: Pool) -> GroupSummary:
    """What planning knew of a group, without the samples that the plan removes."""
    summary = summary_from_header(pool.read_header(plan.groups[number].ref))
    removed = sorted(sample.member for sample in plan.samples if sample.group == number and sample.removed)
    return with_removed(summary, removed)


def _rewards_of(plan: BatchPlan) -> ProcessedRewards:
    raw: list[list[float]] = [[] for _ in plan.groups]
    rewards: list[list[float]] = [[] for _ in plan.groups]
    for sample in plan.samples:
        raw[sample.group].append(sample.reward)
        rewards[sample.group].append(sample.advantage)
    return ProcessedRewards(raw, rewards)


def _with_values(settings: Settings, values: Mapping[str, Any], passed_on: PassedOn) -> Settings:
    for field, value in values.items():
        group = all_flags()[field][0]
        settings = dataclasses.replace(
            settings, **{group: dataclasses.replace(vars(settings)[group], **{field: value})}
        )
    words = PassedOn(megatron=list(settings.megatron_args))
    words.extend(passed_on)
    return dataclasses.replace(settings, megatron_args=tuple(words.megatron))
