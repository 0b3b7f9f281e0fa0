"""What a session starts from: a commit of its run, or for a new run the weights that --load names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from pipeline.run_folder import RunFolder
from recovery.commit import committed_rollouts
from recovery.restore import RestorePlan, plan_restore
from recovery.run_on_disk import scan_run
from vime.backends.megatron_utils.weight_source import WeightSource
from vime.errors import RestoreError
from vime.settings.groups import Settings

_PARTIAL = ("--finetune", "--no-load-optim", "--no-load-rng")


def plan_session(settings: Settings, *, new_branch: str) -> RestorePlan:
    """The restore plan. Weights that --load names begin a run; once it has a commit, that is what it goes on from.

    Raises:
        RestoreError: see `recovery.restore.plan_restore`; or --load has no such checkpoint, or --start-rollout-id is
            another rollout than that at which the run begins or goes on.
        SettingsError: --ckpt-step with a Hugging Face folder.
    """
    plan = _plan(settings, new_branch)
    given = settings.checkpoint.start_rollout_id
    if given is not None and given != plan.start_rollout:
        found = (
            "A new run begins" if plan.commit_rollout is None else f"After commit {plan.commit_rollout} the run goes on"
        )
        raise RestoreError(
            f"--start-rollout-id is {given}. {found} at rollout {plan.start_rollout}.",
            next_step="Leave the flag out, or choose the commit with --ckpt-step.",
        )
    return plan


def _plan(settings: Settings, new_branch: str) -> RestorePlan:
    folder, checkpoint = RunFolder.of(settings), settings.checkpoint
    source = start_source(settings)
    is_absent = source is None and checkpoint.ref_load is not None and _names_nothing(settings)
    leaves_run_alone = source is not None or is_absent
    plan = plan_restore(
        scan_run(folder.root, folder.queue, folder.output),
        load=None if leaves_run_alone else checkpoint.load,
        save=str(folder.root),
        ckpt_step=None if leaves_run_alone else checkpoint.ckpt_step,
        num_rollout=settings.data.num_rollout or 0,
        new_branch=new_branch,
        output=folder.output,
    )
    if plan.commit_rollout is not None:
        refuse_partial_load(settings.megatron_args)
        return plan
    words = []
    if source is not None:
        source.refuse_unused_iteration()
        if not source.is_hugging_face:
            source.megatron_folder()
        words = [f"The actor starts with the weights of --load {checkpoint.load}; optimizer and schedule begin anew."]
    elif is_absent:
        words = [f"--load {checkpoint.load} holds no checkpoint: the actor starts as --ref-load {checkpoint.ref_load}."]
    return dataclasses.replace(plan, words=[*plan.words, *words])


def start_source(settings: Settings) -> WeightSource | None:
    """The weights that --load names, where it doesn't name a run: those of a Hugging Face or Megatron folder."""
    checkpoint = settings.checkpoint
    if checkpoint.load is None or _names_run(settings, checkpoint.load):
        return None
    source = WeightSource("--load", Path(checkpoint.load).absolute(), checkpoint.ckpt_step)
    return source if source.holds_weights else None


def _names_run(settings: Settings, load: str) -> bool:
    """Whether --load is one commit, the run's own folder, or a folder with commits."""
    path = Path(load)
    own = RunFolder.of(settings).root.resolve()
    return path.suffix == ".json" or path.resolve().is_relative_to(own) or bool(committed_rollouts(path))


def refuse_partial_load(megatron_args: Sequence[str]) -> None:
    """A commit is taken whole. Raises `RestoreError` for a flag of Megatron's that asks for a part of it."""
    found = [flag for flag in _PARTIAL if flag in megatron_args]
    if found:
        raise RestoreError(
            f"{', '.join(found)} with a commit to go on from: its weights, optimizer, schedule and random state belong "
            "together.",
            next_step="Leave the flag out; or start a new run (another --save) from exported weights.",
        )


def _names_nothing(settings: Settings) -> bool:
    load = settings.checkpoint.load
    return load is not None and not _names_run(settings, load)
