"""A stored rollout trained again: its sources, the ranks that train it, and the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pipeline.replay.changes import changed_settings, plan_for
from pipeline.replay.compare import Comparison, SampleChange, compare, sample_changes
from pipeline.replay.job import ReplayJob, Stage, write_job
from pipeline.replay.ranks import run_ranks
from pipeline.replay.source import ReplaySource, with_threads
from pipeline.session_plan import start_source
from pipeline.step_results import RolloutResult, read_results
from recovery.commit_lock import kept_commit
from storage.files import make_folder
from storage.pool import Pool
from vime.errors import NoRunError, SettingsError
from vime.settings.groups import Settings
from vime.settings.groups.debug import DebugSettings
from vime.settings.roles import settings_of_role
from vime.settings.rules.quantities import has_critic, model_parallel_size


@dataclasses.dataclass(frozen=True)
class ReplayOptions:
    """What the user asks for."""

    hf_checkpoint: str | None = None
    """In place of the run's."""
    settings: str | None = None
    """File of settings that the whole replay has in place of the run's."""
    diff: str | None = None
    """File of settings that the last rollout alone has in place of the run's."""
    tolerance: float = 1e-3


class MetricChange(msgspec.Struct, frozen=True):
    """A metric of the last optimizer step in the run, and under the changed settings."""

    name: str
    logged: float | None
    found: float | None


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `vime replay` says."""

    rollout_id: int
    branch: str
    commit: int | None
    """Rollout of the commit that the replay began at; None: the weights that the run began with."""
    trained: list[int]
    """Rollouts that were trained again."""
    verdict: str
    comparison: Comparison
    """Without the rollout itself under --diff."""
    sample_changes: list[SampleChange] = []
    """Under --diff, the largest first."""
    metric_changes: list[MetricChange] = []


def replay(source: ReplaySource, scratch: Path, options: ReplayOptions) -> ReplayReport:
    """Train the rollouts of `source` in processes of this machine; all files go to the folder `scratch`.

    Raises `VimeError`: settings that can't work, a commit or payload that is damaged, a rank that failed.
    """
    settings = _of_replay(source, scratch, options)
    changed = None if options.diff is None else changed_settings(settings, "--diff", options.diff)
    world_size = settings.cluster.num_trainer_ranks
    if changed is not None and changed.cluster.num_trainer_ranks != world_size:
        raise SettingsError(
            f"{options.diff} asks for {changed.cluster.num_trainer_ranks} ranks, allowed: {world_size} as before.",
            next_step="Change the layout with --settings, which holds for the whole replay.",
        )
    with Pool.open(source.pool) as pool:
        stages = _stages(source, pool, settings, changed, scratch)
    make_folder(scratch / "training_log")
    make_folder(scratch / "logs")
    write_job(scratch, ReplayJob(world_size, stages))
    with kept_commit(source.commit):
        run_ranks(scratch, world_size, patience_s=settings.queue.stall_timeout)
    return _report(source, scratch, options)


def _of_replay(source: ReplaySource, scratch: Path, options: ReplayOptions) -> Settings:
    """The run's settings with everything that is written in `scratch`, and without what a replay leaves out."""
    settings = with_threads(source.settings, source.layout)
    load = settings.checkpoint.load if start_source(settings) is not None else None
    checkpoint = dataclasses.replace(settings.checkpoint, load=load, save=str(scratch), save_hf=None)
    if options.hf_checkpoint is not None:
        checkpoint = dataclasses.replace(checkpoint, hf_checkpoint=options.hf_checkpoint)
    queue = dataclasses.replace(
        settings.queue,
        rollout_data_transport="straw",
        rollout_data_dir=str(source.pool.parent),
        rollout_queue_run_id=source.run_id,
    )
    weights = dataclasses.replace(
        settings.weights, update_weight_transport="nccl", update_weight_mode="full", update_weight_disk_dir=None
    )
    debug = DebugSettings()
    settings = dataclasses.replace(settings, checkpoint=checkpoint, queue=queue, weights=weights, debug=debug)
    if options.settings is not None:
        settings = changed_settings(settings, "--settings", options.settings)
    refuse_no_model(settings.checkpoint.hf_checkpoint, source.settings.checkpoint.hf_checkpoint)
    ranks, model = settings.cluster.num_trainer_ranks, model_parallel_size(settings)
    if ranks % model:
        raise SettingsError(
            f"{ranks} ranks can't hold a model that is split over {model}.",
            next_step="Change actor_num_gpus_per_node under [cluster] of --settings.",
        )
    return settings


def refuse_no_model(given: str | None, of_run: str | None) -> None:
    """Raise `NoRunError` when `given`, the model folder of the replay, is none; `of_run` is what the run was given."""
    folder = Path(given or "")
    if (folder / "config.json").is_file():
        return
    found = "holds no config.json" if folder.is_dir() else "is no folder"
    if given == of_run:
        raise NoRunError(
            f"The run's --hf-checkpoint {given} {found} here.",
            next_step="Give its place on this machine with --hf-checkpoint DIR.",
        )
    raise NoRunError(f"--hf-checkpoint {given} {found}.", next_step="Give the folder of the run's Hugging Face model.")


def _stages(
    source: ReplaySource, pool: Pool, settings: Settings, changed: Settings | None, scratch: Path
) -> list[Stage]:
    """One stage, or under --diff the rollouts before and then the last one."""
    directory, commit = (None, None) if source.commit is None else (str(source.commit[0]), source.commit[1])
    plans = [plan_for(stored.plan, pool, source.settings, settings) for stored in source.rollouts]
    if changed is None:
        return [Stage(settings, directory, commit, plans)]
    last = plan_for(source.rollouts[-1].plan, pool, source.settings, changed)
    if len(plans) == 1:
        return [Stage(changed, directory, commit, [last])]
    if has_critic(settings) and settings_of_role(settings, "critic")[0].checkpoint.save is not None:
        raise SettingsError(
            "A critic with a --save of its own would write there between the rollouts before and the changed one.",
            next_step="Choose the first rollout after a commit.",
        )
    return [
        Stage(settings, directory, commit, plans[:-1], saves=True),
        Stage(changed, str(scratch), plans[-2].rollout_id, [last]),
    ]


def _report(source: ReplaySource, scratch: Path, options: ReplayOptions) -> ReplayReport:
    last = source.rollouts[-1]
    numbers = [stored.rollout_id for stored in source.rollouts]
    branches = dict.fromkeys(stored.plan.branch for stored in source.rollouts)
    found = [result for branch in branches for result in read_results(scratch, branch, numbers)]
    logged = [result for stored in source.rollouts for result in stored.results]
    if options.diff is None:
        comparison, samples, metrics = compare(logged, found, options.tolerance), [], []
        verdict = comparison.words
    else:
        before = numbers[:-1]
        comparison = compare(_only(logged, before), _only(found, before), options.tolerance)
        samples = sample_changes(last.results, _only(found, numbers[-1:]))
        metrics = _metric_changes(last.results, _only(found, numbers[-1:]))
        moved = sum(change.logged != change.found for change in samples)
        verdict = f"{moved} of {len(samples)} samples have another loss under {options.diff}"
    return ReplayReport(
        rollout_id=last.rollout_id,
        branch=last.plan.branch,
        commit=None if source.commit is None else source.commit[1],
        trained=numbers,
        verdict=verdict,
        comparison=comparison,
        sample_changes=samples,
        metric_changes=metrics,
    )


def _only(results: Sequence[RolloutResult], rollouts: Sequence[int]) -> list[RolloutResult]:
    return [result for result in results if result.rollout_id in rollouts]


def _metric_changes(logged: Sequence[RolloutResult], found: Sequence[RolloutResult]) -> list[MetricChange]:
    there, here = ({} if not of or not of[0].steps else of[0].steps[-1].metrics for of in (logged, found))
    return [MetricChange(name, there.get(name), here.get(name)) for name in dict.fromkeys([*there, *here])]
