"""The restore plan: from what is on disk and the flags to what the run starts from. Pure; `scan_run` does the I/O."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recovery.branch import Branch, read_branches
from recovery.commit import CommitParent, committed_rollouts
from vime.errors import RestoreError


class RestoreMode(enum.Enum):
    NEW = "new"
    RESUME = "resume"
    """From a commit: model, optimizer and the trained set go back to it; accepted groups are kept."""
    RESTART = "restart"
    """A run that died before its first commit: the model starts anew, accepted groups are kept."""
    COMPLETE = "complete"
    """Nothing to do: every rollout is committed."""


@dataclass(frozen=True)
class RunOnDisk:
    """What a run folder holds. `commits` maps each folder with commits (relative) to its rollouts, ascending."""

    has_queue: bool
    branches: Sequence[Branch]
    commits: dict[str, list[int]]


@dataclass(frozen=True)
class RestorePlan:
    """How a session starts. Folders are relative to the run folder."""

    mode: RestoreMode
    directory: str
    """Where this session writes its commits."""
    start_rollout: int
    commit_directory: str | None = None
    commit_rollout: int | None = None
    words: list[str] = field(default_factory=list)
    """What was chosen and why, a sentence each."""


_CHECK_LOAD = "Check --load, or leave it out to go on with what --save holds."


def scan_run(run: Path, queue_root: Path) -> RunOnDisk:
    """Read what a run folder and its queue hold; small files only."""
    commits = {folder: rollouts for folder in commit_folders(run) if (rollouts := committed_rollouts(run / folder))}
    return RunOnDisk((queue_root / "vime" / "queue.json").exists(), read_branches(run), commits)


def commit_folders(run: Path) -> list[str]:
    """Folders of a run that may hold commits, relative to it."""
    branches = run / "branches"
    return [".", *(sorted(f"branches/{path.name}" for path in branches.iterdir()) if branches.is_dir() else [])]


def parse_load(load: str) -> tuple[Path, int | None]:
    """`--load` as (folder, rollout): a folder, or the exact file `<folder>/rollout/committed_<n>.json`."""
    path = Path(load)
    if path.suffix != ".json":
        return path, None
    number = path.stem.removeprefix("committed_")
    if path.parent.name != "rollout" or not number.isdigit():
        raise RestoreError(
            f"--load {load}: allowed are a run folder and <folder>/rollout/committed_<n>.json.",
            next_step="Name one of these.",
        )
    return path.parent.parent, int(number)


def plan_restore(
    disk: RunOnDisk,
    *,
    load: str | None,
    save: str,
    ckpt_step: int | None,
    num_rollout: int,
    new_branch: str,
) -> RestorePlan:
    """Decide what a session starts from.

    `load` None stands for "go on with what `save` holds". The queue and its commits live in one run folder, so
    `load` must be `save`, a folder of one of its branches, or a commit file in either. `num_rollout` 0 trains nothing,
    whatever the commit.

    Raises:
        RestoreError: the commit asked for doesn't exist, or lies past `num_rollout`.
    """
    words: list[str] = []
    folder, exact = parse_load(load) if load is not None else (Path(save), None)
    relative = _relative_folder(folder, Path(save))
    wanted = _wanted_rollout(exact, ckpt_step)
    if relative != ".":
        rollouts = disk.commits.get(relative, [])
        if not rollouts:
            raise RestoreError(f"--load {folder} doesn't exist or holds no commit.", next_step=_CHECK_LOAD)
    else:
        relative, rollouts = _active_folder(disk, wanted)
    if not rollouts:
        return _without_commit(disk, wanted, folder)
    chosen = rollouts[-1] if wanted is None else wanted
    if chosen not in rollouts:
        raise RestoreError(
            f"{folder}: no commit of rollout {chosen}; there are {_listed(rollouts)}.",
            next_step="Choose one of these with --ckpt-step, or leave it out for the newest.",
        )
    start = chosen + 1
    if num_rollout == 0:
        words = [f"Evaluating the commit of rollout {chosen} in {folder}; nothing is trained."]
        return RestorePlan(RestoreMode.COMPLETE, relative, start, relative, chosen, words)
    if start > num_rollout:
        raise RestoreError(
            f"The commit of rollout {chosen} is {start} rollouts in, past --num-rollout {num_rollout}.",
            next_step=f"Raise --num-rollout above {start}, or choose an older commit with --ckpt-step.",
        )
    if start == num_rollout:
        return RestorePlan(
            RestoreMode.COMPLETE,
            relative,
            start,
            relative,
            chosen,
            [f"Nothing to do: already at {start} of {num_rollout}."],
        )
    words.append(
        f"Resuming from the commit of rollout {chosen} ({'newest' if wanted is None else 'asked for'}) "
        f"of {len(rollouts)} in {folder}."
    )
    later = [rollout for rollout in rollouts if rollout > chosen]
    directory = f"branches/{new_branch}" if later else relative
    if later:
        words.append(f"Commits {_listed(later)} stay where they are; this session writes to {directory}.")
    return RestorePlan(RestoreMode.RESUME, directory, start, relative, chosen, words)


def parent_of(plan: RestorePlan, record_branch: str | None) -> CommitParent | None:
    """Parent of the new branch; `record_branch` is the branch named by the chosen commit's record."""
    if plan.commit_rollout is None or record_branch is None:
        return None
    return CommitParent(record_branch, plan.commit_rollout)


def _relative_folder(folder: Path, save: Path) -> str:
    try:
        return str(folder.resolve().relative_to(save.resolve()))
    except ValueError as error:
        if not folder.exists():
            raise RestoreError(f"--load {folder} doesn't exist.", next_step=_CHECK_LOAD) from error
        raise RestoreError(
            f"--load {folder} lies outside --save {save}; a run goes on in its own folder.",
            next_step=f"Use --save {folder}.",
        ) from error


def _wanted_rollout(exact: int | None, ckpt_step: int | None) -> int | None:
    if exact is not None and ckpt_step is not None and exact != ckpt_step:
        raise RestoreError(
            f"--load names the commit of rollout {exact}, --ckpt-step is {ckpt_step}.",
            next_step="Leave one of them out.",
        )
    return ckpt_step if exact is None else exact


def _active_folder(disk: RunOnDisk, wanted: int | None) -> tuple[str, list[int]]:
    """Folder of the newest branch that has a commit (the wanted one, if one is wanted)."""
    for branch in reversed(disk.branches):
        rollouts = disk.commits.get(branch.directory, [])
        if rollouts and (wanted is None or wanted in rollouts):
            return branch.directory, rollouts
    return ".", disk.commits.get(".", [])


def _without_commit(disk: RunOnDisk, wanted: int | None, folder: Path) -> RestorePlan:
    if wanted is not None:
        next_step = "Check the folder, or leave out --ckpt-step (or the file name in --load) to start anew."
        raise RestoreError(f"{folder}: no commit of rollout {wanted}; there is none at all.", next_step=next_step)
    if disk.has_queue:
        words = [f"{folder} holds a run without a commit: training starts anew, its accepted groups are kept."]
        return RestorePlan(RestoreMode.RESTART, ".", 0, words=words)
    if disk.branches:
        words = [f"{folder} holds a run without a commit, and its groups are gone: it starts anew."]
        return RestorePlan(RestoreMode.NEW, ".", 0, words=words)
    return RestorePlan(RestoreMode.NEW, ".", 0, words=["New run."])


def _listed(rollouts: Sequence[int]) -> str:
    return ", ".join(str(rollout) for rollout in rollouts[-8:])
