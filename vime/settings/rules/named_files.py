"""Rules on the YAML files that settings name. `vime.settings.schemas` reads them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from vime.errors import SettingsError
from vime.settings.extra_args import flags_added_by
from vime.settings.groups import GROUPS, Settings
from vime.settings.passed_on import listed_megatron_names
from vime.settings.roles import settings_of_role
from vime.settings.rules.megatron import SIZES
from vime.settings.rules.problem import Problem, problem_of
from vime.settings.rules.quantities import has_critic
from vime.settings.rules.rollout import REWARDS
from vime.settings.schemas import eval_config, megatron_config, vllm_config
from vime.settings.schemas.eval_sets import evaluation_sets


def roles_can_be_overridden(settings: Settings) -> Iterator[Problem]:
    """A wrong value would appear when the trainer's processes are up, minutes later."""
    path = settings.trainer.megatron_config_path
    if path is not None:
        try:
            megatron_config.check_megatron_config(path, _arguments(settings))
        except SettingsError as error:
            yield problem_of(megatron_config.FLAG, error)


def roles_have_the_same_layout(settings: Settings) -> Iterator[Problem]:
    """Actor and critic take turns on the same ranks."""
    fixed = {flag[2:].replace("-", "_") for flag in SIZES} | {"num_nodes", "num_gpus_per_node"}
    for place, entry in _roles(settings):
        for key in entry.overrides or entry.args or {}:
            if key.replace("-", "_") in fixed:
                yield Problem(
                    (megatron_config.FLAG,),
                    f"{place} overrides {key}",
                    "left out",
                    "Actor and critic share their GPUs and have the same parallel layout.",
                    "Give it on the command line, for both.",
                )


def roles_override_what_they_may(settings: Settings) -> Iterator[Problem]:
    """A flag of the whole run would be read by one role's ranks alone."""
    roles: tuple[megatron_config.Role, ...] = ("actor", "critic")
    for role in roles:
        try:
            settings_of_role(settings, role)
        except SettingsError as error:
            if not list(roles_can_be_overridden(settings)):
                yield problem_of(megatron_config.FLAG, error)


def a_critics_entry_has_a_critic(settings: Settings) -> Iterator[Problem]:
    """Without ppo the entry would never be used."""
    for place, entry in _roles(settings):
        if entry.role == "critic" and not has_critic(settings):
            yield Problem(
                (megatron_config.FLAG, "--advantage-estimator"),
                f"{place}.role is critic with --advantage-estimator {settings.objective.advantage_estimator}",
                "ppo",
                "Only ppo has a critic.",
                "Remove the entry.",
            )


def server_groups_are_whole(settings: Settings) -> Iterator[Problem]:
    """Engines are started group by group, so a wrong one would be found when others run already."""
    path = settings.engine.vllm_config
    if path is not None:
        try:
            vllm_config.read_vllm_config(path, settings)
        except SettingsError as error:
            yield problem_of(vllm_config.FLAG, error)


def evaluation_file_names_data_sets(settings: Settings) -> Iterator[Problem]:
    """The first evaluation may be hours away."""
    path = settings.evaluation.eval_config
    if path is not None:
        try:
            eval_config.read_eval_config(path)
        except SettingsError as error:
            yield problem_of(eval_config.FLAG, error)


def evaluation_is_scored(settings: Settings) -> Iterator[Problem]:
    """A run may train without a reward, by distillation; an evaluation without one says nothing."""
    for each in _evaluation_sets(settings):
        if each.rm_type is None and each.custom_rm_path is None and not settings.objective.is_supervised:
            yield Problem(
                ("--rm-type", "--custom-rm-path"),
                f"No reward is named for the evaluation data set {each.name}",
                "--rm-type, --custom-rm-path, or one of these in --eval-config",
                "Its answers are scored by it.",
                "Name one.",
            )


def evaluation_rewards_are_known(settings: Settings) -> Iterator[Problem]:
    """They would be looked up when the engines run."""
    for each in _evaluation_sets(settings):
        if each.rm_type not in (None, settings.rollout.rm_type) and each.rm_type.removeprefix("boxed_") not in REWARDS:
            yield Problem(
                (eval_config.FLAG,),
                f"{settings.evaluation.eval_config}: rm_type of {each.name} is {each.rm_type!r}",
                f"{', '.join(REWARDS)}, each also as boxed_NAME",
                "There is no such built-in reward.",
                "Choose one of these or give custom_rm_path.",
            )


def named_file_warnings(settings: Settings) -> list[str]:
    """What is allowed in these files and may surprise; nothing about a file that the rules refuse."""
    roles, groups = settings.trainer.megatron_config_path, settings.engine.vllm_config
    warnings = []
    with contextlib.suppress(SettingsError):
        warnings += [] if roles is None else megatron_config.check_megatron_config(roles, _arguments(settings))
    with contextlib.suppress(SettingsError):
        if groups is not None:
            warnings += vllm_config.vllm_config_warnings(groups, vllm_config.read_vllm_config(groups, settings))
    return warnings


def _roles(settings: Settings) -> list[tuple[str, megatron_config.RoleEntry]]:
    """Place and entry of each role; none when the file can't be read, which has a rule of its own."""
    path = settings.trainer.megatron_config_path
    try:
        entries = [] if path is None else megatron_config.read_megatron_config(path).megatron
    except SettingsError:
        return []
    return [(f"{path}: megatron[{index}]", entry) for index, entry in enumerate(entries)]


def _evaluation_sets(settings: Settings) -> tuple[eval_config.EvalDataset, ...]:
    """None when the file can't be read, which has a rule of its own."""
    try:
        return evaluation_sets(settings)
    except SettingsError:
        return ()


def _arguments(settings: Settings) -> dict[str, Any]:
    """Every argument's name with its value, None for those that only Megatron knows."""
    path = settings.trainer.extra_args_provider_path
    names = {*listed_megatron_names(), *(() if path is None else flags_added_by(path).values())}
    values: dict[str, Any] = dict.fromkeys(names)
    for group in GROUPS:
        values |= vars(vars(settings)[group])
    return values


RULES = (
    roles_can_be_overridden,
    roles_have_the_same_layout,
    roles_override_what_they_may,
    a_critics_entry_has_a_critic,
    server_groups_are_whole,
    evaluation_file_names_data_sets,
    evaluation_is_scored,
    evaluation_rewards_are_known,
)
