"""What a session goes on from when its trainer was lost: its newest commit, on a branch of its own."""

from __future__ import annotations

import dataclasses
import shutil
import uuid
from pathlib import Path

from pipeline.run_folder import RunFolder
from pipeline.session_start import Start
from recovery.branch import Branch, append_branch
from recovery.commit import commit_path, read_commit, read_queue_state
from recovery.restore import RestoreMode, parent_of


def go_back(start: Start, folder: RunFolder, newest: tuple[Path, int] | None, version: int) -> Start:
    """Begin a branch at the newest commit (folder and rollout), or at the run's beginning when there is none.

    `version` is the policy version that serves: numbers of versions never go back. Raises `CommitError` for a commit
    that is damaged.
    """
    branch = uuid.uuid4().hex[:12]
    if newest is None:
        plan = dataclasses.replace(
            start.plan, mode=RestoreMode.RESTART, start_rollout=0, commit_directory=None, commit_rollout=None
        )
        following = Start(plan, branch, None, None, None)
    else:
        directory, rollout_id = newest
        known = (start.plan.directory, start.plan.commit_directory or "")
        name = next(name for name in known if folder.root / name == directory)
        record = read_commit(commit_path(directory, rollout_id))
        plan = dataclasses.replace(
            start.plan,
            mode=RestoreMode.RESUME,
            start_rollout=rollout_id + 1,
            commit_directory=name,
            commit_rollout=rollout_id,
        )
        state = read_queue_state(directory, rollout_id)
        following = Start(plan, branch, parent_of(plan, record.branch), record, state)
    shutil.copyfile(folder.settings_of(start.branch), folder.settings_of(branch))
    append_branch(folder.root, Branch(branch, following.parent, plan.directory, version))
    return following
