"""Rules on files and folders: what a run reads must be there when it starts, what it writes must be possible."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vime.errors import SettingsError
from vime.folders import file_in_the_way, unreachable
from vime.settings.groups import Settings
from vime.settings.rules.data import GYM_PREFIX, without_slice
from vime.settings.rules.problem import Problem, problem
from vime.settings.schemas.eval_config import read_eval_config
from vime.settings.schemas.eval_sets import named_eval_files


def prompt_file_exists(settings: Settings) -> Iterator[Problem]:
    """Addresses of other file systems are left to the reader."""
    path = settings.data.prompt_data
    if path is not None and settings.data.data_source_path is None:
        yield from _missing(settings, "--prompt-data", without_slice(path), "a file")


def evaluation_files_exist(settings: Settings) -> Iterator[Problem]:
    """The first evaluation may be hours away."""
    for _, path in named_eval_files(settings):
        yield from _missing(settings, "--eval-prompt-data", without_slice(path), "a file")
    for path in _paths_in_file(settings.evaluation.eval_config):
        yield from _missing(settings, "--eval-config", without_slice(path), "a file")


def folders_to_load_exist(settings: Settings) -> Iterator[Problem]:
    """Reference model and teacher are loaded after the actor, minutes later."""
    folders = {
        "--ref-load": settings.checkpoint.ref_load,
        "--opd-teacher-load": settings.objective.opd_teacher_load,
    }
    for flag, path in folders.items():
        if path is not None:
            yield from _missing(settings, flag, path, "a folder")


def commit_to_load_exists(settings: Settings) -> Iterator[Problem]:
    """A folder of --load may still be empty (the first start of a run that resumes itself); one commit may not."""
    path = settings.checkpoint.load
    if path is not None and path.endswith(".json"):
        yield from _missing(settings, "--load", path, "a committed_N.json file, or a run folder")


def stored_samples_exist(settings: Settings) -> Iterator[Problem]:
    """Names with a placeholder are checked batch by batch."""
    stored = {
        "--load-debug-rollout-data": settings.debug.load_debug_rollout_data,
        "--load-forge-rollout-data": settings.debug.load_forge_rollout_data,
        "--ci-load-grad-norm": settings.debug.ci_load_grad_norm,
    }
    for flag, path in stored.items():
        if path is not None and "{" not in path:
            yield from _missing(settings, flag, path, "a file")


def folders_to_write_are_no_files(settings: Settings) -> Iterator[Problem]:
    """They are made where they don't exist, which a file in their place prevents."""
    folders = {
        "--save": settings.checkpoint.save,
        "--rollout-data-dir": settings.queue.rollout_data_dir,
        "--save-hf": settings.checkpoint.save_hf,
    }
    for flag, path in folders.items():
        if path is None:
            continue
        file = file_in_the_way(Path(path.partition("{")[0]))
        if file is not None:
            yield problem(
                settings,
                flag,
                found=f"{flag} {path}: {file} is a file",
                allowed="a folder, or a place where one can be made",
                reason="",
                next_step="Give a folder, or move the file away.",
            )


def _paths_in_file(eval_config: str | None) -> list[str]:
    """Those of its data sets; none when it can't be read, which has a rule of its own."""
    try:
        return [] if eval_config is None else [each.path for each in read_eval_config(eval_config).eval.datasets]
    except SettingsError:
        return []


def _missing(settings: Settings, flag: str, path: str, allowed: str) -> Iterator[Problem]:
    if "://" in path or path.startswith(GYM_PREFIX):
        return
    fault = unreachable(path)
    if fault is not None or not Path(path).exists():
        yield problem(
            settings,
            flag,
            found=f"{flag} {path}: {fault or 'no such file or folder'}",
            allowed=f"{allowed} that exists",
            reason=f"Relative paths start at {Path.cwd()}.",
            next_step="Correct the path.",
        )


RULES = (
    prompt_file_exists,
    evaluation_files_exist,
    folders_to_load_exist,
    commit_to_load_exists,
    stored_samples_exist,
    folders_to_write_are_no_files,
)
