"""Rules between flags: each a function of the settings that tells what can't work.

A rule takes the settings (some the machine too) and yields a `Problem` for each thing wrong; it never raises and, but
for the rules of `FILE_RULES`, reads nothing. Its docstring gives the reason. A new rule goes into the module of its
subject and into the `RULES` or `MACHINE_RULES` at that module's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vime.settings.groups import Settings
from vime.settings.machine import Machine
from vime.settings.rules import (
    batches,
    checkpoint,
    cluster,
    data,
    debug,
    engine_capabilities,
    engines,
    evaluation,
    megatron,
    metrics_out,
    model,
    mount_declaration,
    named_files,
    objective,
    paths,
    reference_model,
    release_train,
    required,
    rollout,
    score_centering,
    storage,
    supervised,
    teacher,
    weights,
)
from vime.settings.rules.problem import Problem

__all__ = ["FILE_RULES", "MACHINE_RULES", "RULES", "MachineRule", "Problem", "Rule"]

Rule = Callable[[Settings], Iterable[Problem]]
MachineRule = Callable[[Settings, Machine], Iterable[Problem]]

RULES: tuple[Rule, ...] = (
    *required.RULES,
    *cluster.RULES,
    *release_train.RULES,
    *engines.RULES,
    *batches.RULES,
    *data.RULES,
    *rollout.RULES,
    *objective.RULES,
    *reference_model.RULES,
    *score_centering.RULES,
    *teacher.RULES,
    *supervised.RULES,
    *weights.RULES,
    *storage.RULES,
    *checkpoint.RULES,
    *evaluation.RULES,
    *debug.RULES,
    *megatron.RULES,
    *metrics_out.RULES,
)
FILE_RULES: tuple[Rule, ...] = (
    *model.RULES,
    *paths.RULES,
    *mount_declaration.RULES,
    *named_files.RULES,
    *rollout.FILE_RULES,
)
"""Rules that read small local files or look for installed packages."""
MACHINE_RULES: tuple[MachineRule, ...] = (
    *cluster.MACHINE_RULES,
    *score_centering.MACHINE_RULES,
    *engine_capabilities.MACHINE_RULES,
)
