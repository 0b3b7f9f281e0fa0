"""From a prompt's line in its file to the optimizer steps that trained its samples, and back; read off the disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from pipeline.messages import decode
from pipeline.planner import BatchPlan, PlannedSample
from pipeline.prompt_places import PromptPlace, prompt_places, read_prompts
from pipeline.training_log import TrainingLogEntry, read_training_logs
from recovery.branch_line import BranchLine
from recovery.run_location import RunLocation
from storage.journal_replay import TaskEvent
from storage.pool import Pool
from storage.queue_view import GroupView, QueueView
from vime.errors import NoRunError


class PlannedStep(msgspec.Struct, frozen=True):
    """A sample in a batch plan."""

    branch: str
    rollout_id: int
    step: int
    """Optimizer step of the rollout, from 0."""
    rank: int
    """Data-parallel rank."""
    microbatch: int
    policy_version: int
    """Served when the batch was planned."""
    age_versions: int
    advantage: float
    counts: bool
    """False: the branch was left at an earlier commit, so this is undone."""


class TrainedStep(msgspec.Struct, frozen=True):
    """A sample in a rank's log of an optimizer step that it took."""

    branch: str
    rollout_id: int
    step: int
    rank: int
    counts: bool


class SampleTrace(msgspec.Struct, frozen=True, kw_only=True):
    """`vime sample trace RUN ID`."""

    sample_index: int
    group_index: int
    prompt: PromptPlace | None
    """None where it can't be read any more."""
    requeued_from: int | None
    segment: int
    state: str
    history: list[TaskEvent]
    """What happened to its group in the queue."""
    position: int | None
    stored_in: str | None
    """Pack file and byte offset of its group's payload."""
    planned: list[PlannedStep]
    trained: list[TrainedStep]
    committed_by: int | None
    """Rollout of the first commit that holds what it taught; None when no commit does yet."""


class StepSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of `vime sample trace RUN --step ROLLOUT`."""

    sample_index: int
    group_index: int
    branch: str
    rollout_id: int
    step: int
    rank: int
    counts: bool
    reward: float | None
    advantage: float | None
    age_versions: int | None
    """These three are of the plan, None where it is not there any more."""
    prompt: PromptPlace | None
    """None where the group's prompt can't be read any more."""


def group_of_sample(view: QueueView, sample_index: int) -> GroupView:
    """The group that a sample belongs to: all groups of a run have the same size.

    Raises `NoRunError` when it was not handed out.
    """
    cursor = view.cursor()
    size = max(1, cursor.next_sample_index // max(1, cursor.next_group_index))
    segment = view.with_group(sample_index // size) if sample_index >= 0 else None
    group = None if segment is None else segment.group(sample_index // size)
    if group is None and 0 <= sample_index < cursor.next_sample_index:
        raise NoRunError(
            f"Sample {sample_index} is of group {sample_index // size}, whose part of the queue was reclaimed.",
            next_step="`vime sample trace RUN --step ROLLOUT` still lists what a step trained.",
        )
    if group is None:
        raise NoRunError(
            f"There is no sample {sample_index}; the run has samples 0 to {cursor.next_sample_index - 1} "
            f"({size} in each of {cursor.next_group_index} groups).",
            next_step="`vime queue tasks RUN` lists the groups.",
        )
    return group


def trace_sample(location: RunLocation, sample_index: int) -> SampleTrace:
    """Everything that the disk tells of one sample. Raises `StorageError` or `NoRunError`."""
    view = QueueView(location.pool)
    group = group_of_sample(view, sample_index)
    line = BranchLine(location.root, view.control_dir)
    with Pool.open(location.pool) as pool:
        prompts = read_prompts(pool, [group])
        planned = list(planned_steps(pool, line, group.position, sample_index))
    trained = [
        TrainedStep(e.branch, e.rollout_id, e.step, e.data_parallel_rank, line.counts(e.branch, e.rollout_id))
        for e in read_training_logs(location.training_logs)
        if sample_index in e.sample_indices
    ]
    return SampleTrace(
        sample_index=sample_index,
        group_index=group.group_index,
        prompt=prompt_places(location, prompts.values()).get(group.group_index),
        requeued_from=group.requeued_from,
        segment=group.segment,
        state=state_words(group, line),
        history=view.segment(group.segment).history(group.group_index),
        position=group.position,
        stored_in=None if group.result_ref is None else f"{group.result_ref.path}@{group.result_ref.offset}",
        planned=planned,
        trained=trained,
        committed_by=_committed_by(line, trained),
    )


def trace_step(location: RunLocation, rollout_id: int, step: int | None, branch: str | None) -> list[StepSample]:
    """The samples of a rollout batch (or of one of its optimizer steps), as the ranks logged them.

    `branch` defaults to the one whose step counts. Raises `StorageError` or `NoRunError`.
    """
    view = QueueView(location.pool)
    line = BranchLine(location.root, view.control_dir)
    entries = [
        entry
        for entry in read_training_logs(location.training_logs)
        if entry.rollout_id == rollout_id
        and (step is None or entry.step == step)
        and (line.counts(entry.branch, rollout_id) if branch is None else entry.branch == branch)
    ]
    if not entries:
        what = f"rollout {rollout_id}" if step is None else f"step {step} of rollout {rollout_id}"
        raise NoRunError(
            f"No rank has logged {what}{'' if branch is None else f' of branch {branch}'}.",
            next_step="`vime queue history RUN` lists the branches and their rollouts.",
        )
    groups = {index for entry in entries for index in entry.group_indices}
    with Pool.open(location.pool) as pool:
        plans = {(plan.branch, plan.rollout_id): plan for plan in _plans(pool, line, None, rollout_id)}
        found = (view.with_group(index) for index in sorted(groups))
        views = [
            g for segment, index in zip(found, sorted(groups), strict=True) if segment and (g := segment.group(index))
        ]
        prompts = read_prompts(pool, views)
    places = prompt_places(location, prompts.values())
    return [
        _step_sample(sample_index, entry, plans.get((entry.branch, rollout_id)), places, line)
        for entry in entries
        for sample_index in entry.sample_indices
    ]


def state_words(group: GroupView, line: BranchLine) -> str:
    """The state of a group, with what the newest branch did to it."""
    if group.position is None:
        return group.state
    if group.position in line.reclaimed:
        return "reclaimed"
    return "trained" if group.position in line.trained else "pending"


def _plans(pool: Pool, line: BranchLine, position: int | None, rollout_id: int | None) -> Iterator[BatchPlan]:
    """Plans with a position, or of a rollout."""
    for record in line.plans:
        if position in record.positions or record.batch_id.endswith(f":{rollout_id}"):
            yield decode(pool.read_blob(record.plan_ref), BatchPlan)


def planned_steps(pool: Pool, line: BranchLine, position: int | None, sample_index: int) -> Iterator[PlannedStep]:
    """Plans that hold a sample of the group at `position`, in the order they were made. Raises `StorageError`."""
    if position is None:
        return
    for plan in _plans(pool, line, position, None):
        numbers = {n for n, sample in enumerate(plan.samples) if sample.sample_index == sample_index}
        for step, planned in enumerate(plan.steps):
            for rank, microbatches in enumerate(planned.ranks):
                for microbatch, members in enumerate(microbatches):
                    for number in numbers.intersection(members):
                        sample = plan.samples[number]
                        yield PlannedStep(
                            plan.branch, plan.rollout_id, step, rank, microbatch, plan.policy_version,
                            sample.age_versions, sample.advantage, line.counts(plan.branch, plan.rollout_id),
                        )  # fmt: skip


def _step_sample(
    sample_index: int,
    entry: TrainingLogEntry,
    plan: BatchPlan | None,
    places: dict[int, PromptPlace],
    line: BranchLine,
) -> StepSample:
    planned: PlannedSample | None = None
    group = -1
    if plan is not None:
        planned = next((sample for sample in plan.samples if sample.sample_index == sample_index), None)
        group = -1 if planned is None else plan.groups[planned.group].group_index
    return StepSample(
        sample_index=sample_index,
        group_index=group,
        branch=entry.branch,
        rollout_id=entry.rollout_id,
        step=entry.step,
        rank=entry.data_parallel_rank,
        counts=line.counts(entry.branch, entry.rollout_id),
        reward=None if planned is None else planned.reward,
        advantage=None if planned is None else planned.advantage,
        age_versions=None if planned is None else planned.age_versions,
        prompt=places.get(group),
    )


def _committed_by(line: BranchLine, trained: Sequence[TrainedStep]) -> int | None:
    rollout = next((step.rollout_id for step in trained if step.counts), None)
    if rollout is None:
        return None
    commits = sorted(c for branch in line.branches for c in line.commits_of(branch) if line.counts(branch.branch, c))
    return next((commit for commit in commits if commit >= rollout), None)
