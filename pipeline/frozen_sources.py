"""From settings to the places of models that aren't trained, found before any process starts."""

from __future__ import annotations

import re
from pathlib import Path

from recovery.commit import commit_path, read_commit
from vime.backends.megatron_utils.weight_source import WeightSource
from vime.settings.groups import Settings

_ITERATION = re.compile(r"iter_(\d+)")


def reference_source(settings: Settings) -> WeightSource | None:
    """Where the reference model lies, and the actor of a new run starts; None without --ref-load."""
    checkpoint = settings.checkpoint
    if checkpoint.ref_load is None:
        return None
    return WeightSource("--ref-load", Path(checkpoint.ref_load).absolute(), checkpoint.ref_ckpt_step)


def teacher_source(settings: Settings) -> WeightSource | None:
    """Where the teacher lies that the trainer runs itself; None without one."""
    objective = settings.objective
    if not objective.use_opd or objective.opd_teacher_load is None:
        return None
    path = Path(objective.opd_teacher_load).absolute()
    return WeightSource("--opd-teacher-load", path, objective.opd_teacher_ckpt_step)


def check_sources(settings: Settings) -> None:
    """Find the frozen models; those that a run of vime has committed are compared with their digests.

    Raises:
        RestoreError: there is no checkpoint.
        SettingsError: a step of a Hugging Face folder is asked for.
        CommitError: a file is missing or damaged.
    """
    for source in (reference_source(settings), teacher_source(settings)):
        if source is None:
            continue
        source.refuse_unused_iteration()
        if source.is_hugging_face:
            continue
        match = _ITERATION.fullmatch(source.megatron_folder().name)
        commit = None if match is None else commit_path(source.directory, int(match[1]))
        if commit is not None and commit.exists():
            read_commit(commit)
