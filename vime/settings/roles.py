"""Settings of the actor and of the critic, as `--megatron-config-path` tells them apart."""

from __future__ import annotations

import dataclasses
from typing import Any

from vime.settings.groups import Settings, all_flags
from vime.settings.schemas.megatron_config import FLAG, MegatronConfig, Role, read_megatron_config
from vime.settings.schemas.typed_yaml import refuse
from vime.settings.values import check_value, from_file

_OPTIMIZER = (
    *("lr", "clip_grad", "use_stateless_adam", "reset_optimizer_states"),
    *("only_train_params_name_list", "freeze_params_name_list", "gamma", "lambd"),
)
FIELDS_OF_ROLES: dict[Role, tuple[str, ...]] = {
    "actor": (*_OPTIMIZER, "eps_clip", "eps_clip_high", "eps_clip_c", "entropy_coef"),
    "critic": (*_OPTIMIZER, "value_clip", "calculate_per_token_loss", "load", "save"),
}
"""Flags of vime that a role may have another value of, by field. Of Megatron's own arguments it may override any."""


def settings_of_role(settings: Settings, role: Role) -> tuple[Settings, dict[str, Any]]:
    """(settings with the role's values of vime's flags, its values of Megatron's arguments by attribute name).

    For the critic `checkpoint.load` and `checkpoint.save` are its own: None where the file names none.

    Raises:
        SettingsError: the file can't be read, or overrides a flag that is the same for both roles.
    """
    path = settings.trainer.megatron_config_path
    if role == "critic":
        settings = _replaced(settings, {"load": None, "save": None})
    if path is None:
        return settings, {}
    own, passed_on = _split(path, read_megatron_config(path), role)
    return _replaced(settings, own), passed_on


def _split(path: str, config: MegatronConfig, role: Role) -> tuple[dict[str, Any], dict[str, Any]]:
    own: dict[str, Any] = {}
    passed_on: dict[str, Any] = {}
    for index, entry in enumerate(config.megatron):
        table = "args" if entry.args is not None else "overrides"
        for key, value in (entry.overrides or entry.args or {}).items() if entry.role == role else ():
            field, place = key.replace("-", "_"), f"megatron[{index}].{table}.{key}"
            if field not in all_flags():
                passed_on[field] = value
                continue
            described = all_flags()[field][1]
            if field not in FIELDS_OF_ROLES[role]:
                allowed = ", ".join(FIELDS_OF_ROLES[role])
                raise refuse(
                    path,
                    place,
                    f"is a flag of the whole run, allowed for the {role}: {allowed}, and Megatron's own arguments",
                    f"Give {described.name} on the command line.",
                )
            where = f"{FLAG} {path}: {place}"
            own[field] = from_file(described, value, where)
            check_value(described, own[field], where)
    return own, passed_on


def _replaced(settings: Settings, values: dict[str, Any]) -> Settings:
    for field, value in values.items():
        group = all_flags()[field][0]
        changed = dataclasses.replace(vars(settings)[group], **{field: value})
        settings = dataclasses.replace(settings, **{group: changed})
    return settings
