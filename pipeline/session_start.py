"""What a session starts from, read off the disk, and what its queue is told of that."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from pipeline.batch_wait import batches_left_waiting
from pipeline.coordinator_config import CoordinatorConfig
from pipeline.run_folder import RunFolder
from pipeline.session_plan import plan_session
from recovery.commit import CommitParent, CommitRecord, QueueState, commit_path, read_commit, read_queue_state
from recovery.restore import RestorePlan, parent_of
from storage.disk_reserve import GIB
from storage.positions import PositionRanges
from vime.settings.groups import Settings


@dataclass(frozen=True)
class Start:
    """What a session starts from."""

    plan: RestorePlan
    branch: str
    parent: CommitParent | None
    commit: CommitRecord | None
    state: QueueState | None


def coordinator_config(settings: Settings, start: Start, session: str) -> CoordinatorConfig:
    """What the coordinator of the session of that name is told. Batches trained before may have had another size."""
    data, queue = settings.data, settings.queue
    batch = data.rollout_batch_size or 0
    trained = [] if start.state is None else start.state.trained
    left = max(0, (data.num_rollout or 0) - start.plan.start_rollout)
    return CoordinatorConfig(
        branch=start.branch,
        session=session,
        trained=trained,
        groups_wanted=len(PositionRanges(trained)) + left * batch,
        max_groups=queue.rollout_queue_max_groups or max(2 * batch, data.over_sampling_batch_size or 0),
        surplus=max(0, (data.over_sampling_batch_size or batch) - batch),
        lease_seconds=queue.rollout_queue_lease_seconds,
        next_group_index=0 if start.state is None else start.state.next_group_index,
        memory=None if start.state is None else start.state.memory,
        batch=max(1, batch),
        max_staleness=queue.max_staleness,
        newest_only=batches_left_waiting() > 0,
        online_gc=queue.rollout_queue_online_gc,
        reserve_bytes=round(queue.rollout_disk_reserve_gib * GIB),
    )


def prepare_start(settings: Settings, folder: RunFolder, *, branch: str | None = None) -> Start:
    """What the session `branch`, one with a new name when left out, starts from. Reads only."""
    branch = branch or uuid.uuid4().hex[:12]
    plan = plan_session(settings, new_branch=branch)
    if plan.commit_directory is None or plan.commit_rollout is None:
        return Start(plan, branch, None, None, None)
    directory = folder.root / plan.commit_directory
    record = read_commit(commit_path(directory, plan.commit_rollout))
    state = read_queue_state(directory, plan.commit_rollout)
    return Start(plan, branch, parent_of(plan, record.branch), record, state)
