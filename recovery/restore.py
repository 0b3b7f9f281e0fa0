"""The restore plan: from what is on disk and the flags to what the run starts from. Pure; `scan_run` does the I/O."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recovery.branch import ancestry
from recovery.commit import CommitParent
from recovery.run_on_disk import RunOnDisk, folder_name, is_below
from vime.counted import counted
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
class RestorePlan:
    """How a session starts. Folders are named as in `RunOnDisk`."""

    mode: RestoreMode
    directory: str
    """Where this session writes its commits."""
    start_rollout: int
    commit_directory: str | None = None
    commit_rollout: int | None = None
    words: list[str] = field(default_factory=list)
    """What was chosen and why, and what was left aside and why, a sentence each."""


@dataclass(frozen=True)
class _Choice:
    """A commit that somebody asked for."""

    rollout: int
    why: str
    flag: str = ""


_CHECK_LOAD = "Check --load, or leave it out to go on with what --save holds."


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
    output: str = ".",
) -> RestorePlan:
    """Decide what a session starts from.

    `save` is the run folder and `output` the folder for commits, which may be another. `load` None stands for "go on
    with what `output` holds"; otherwise it is the run folder, a folder of one of its branches, or a commit file in
    either. A folder stands for its newest branch, whose commits are those of its ancestors up to each fork, too; a file
    reaches every commit. `num_rollout` 0 trains nothing, whatever the commit.

    An `output` outside of the run folder that has commits already goes on with these when the run is named without a
    commit: the command that began there is given again.

    Raises:
        RestoreError: the commit asked for doesn't exist, or lies past `num_rollout`; or the tracker was edited to
            something that is no commit.
    """
    folder, exact = parse_load(load) if load is not None else (Path(save) / output, None)
    name = folder_name(folder, Path(save))
    _refuse_elsewhere(disk, folder, name, Path(save), output)
    asked = _asked_for(exact, ckpt_step)
    about_folders = _words_about_folders(save, output)
    if asked is None and _goes_on_elsewhere(disk, name, output):
        about_folders.append(f"--load {folder} is where the session in {output} began, which goes on.")
        folder, name = Path(output), output
    commits = dict.fromkeys(disk.commits.get(name, []), name) if exact is not None else _commits_of_line(disk, name)
    if not commits and name not in (".", output):
        raise RestoreError(f"--load {folder} doesn't exist or holds no commit.", next_step=_CHECK_LOAD)
    if not commits:
        return _without_commit(disk, asked, folder, output)
    newest = max(commits)
    wanted, words = _wanted(disk, name, asked, newest)
    chosen = newest if wanted is None else wanted.rollout
    if chosen not in commits:
        raise _not_there(disk, folder, chosen, sorted(commits), None if wanted is None else wanted.why)
    source, start = commits[chosen], chosen + 1
    if num_rollout == 0:
        told = [f"Evaluating the commit of rollout {chosen} in {folder}; nothing is trained."]
        return RestorePlan(RestoreMode.COMPLETE, source, start, source, chosen, told)
    if start > num_rollout:
        raise RestoreError(
            f"The commit of rollout {chosen} is {start} rollouts in, past --num-rollout {num_rollout}.",
            next_step=f"Raise --num-rollout above {start}, or choose an older commit with --ckpt-step.",
        )
    if start == num_rollout:
        told = [f"Nothing to do: already at {start} of {num_rollout}."]
        return RestorePlan(RestoreMode.COMPLETE, source, start, source, chosen, told)
    later = [rollout for rollout in disk.commits[source] if rollout > chosen]
    directory = _destination(disk, source, output, new_branch, is_newest=not later)
    why = "newest" if wanted is None else wanted.why
    told = [f"Resuming from the commit of rollout {chosen} ({why}); {folder} has {counted(len(commits), 'commit')}."]
    if later:
        told.append(f"Commits {_listed(later)} stay where they are; this session writes to {directory}.")
    elif directory != source:
        told.append(f"This session writes its commits to {directory}.")
    told += [*about_folders, *words, *_left_aside(disk, chosen)]
    return RestorePlan(RestoreMode.RESUME, directory, start, source, chosen, told)


def parent_of(plan: RestorePlan, record_branch: str | None) -> CommitParent | None:
    """Parent of the new branch; `record_branch` is the branch named by the chosen commit's record."""
    if plan.commit_rollout is None or record_branch is None:
        return None
    return CommitParent(record_branch, plan.commit_rollout)


def _goes_on_elsewhere(disk: RunOnDisk, name: str, output: str) -> bool:
    """Whether the folder for commits lies outside of the run folder, and is what goes on in place of `name`."""
    return Path(output).is_absolute() and not is_below(name, output) and bool(_commits_of_line(disk, output))


def _words_about_folders(save: str, output: str) -> list[str]:
    """What lies where, of a run whose commits go to another folder."""
    if not Path(output).is_absolute():
        return []
    return [f"Commits of this session go to {output}; queue, logs and metrics stay with the run in {save}."]


def _refuse_elsewhere(disk: RunOnDisk, folder: Path, name: str, save: Path, output: str) -> None:
    """Refuse a folder that is not of this run."""
    if not Path(name).is_absolute() or name == output or name in disk.commits:
        return
    if not folder.exists():
        raise RestoreError(f"--load {folder} doesn't exist.", next_step=_CHECK_LOAD)
    raise RestoreError(
        f"--load {folder} holds no commit and lies outside --save {save}.",
        next_step=f"Use --save {folder} to go on with what it holds.",
    )


def _asked_for(exact: int | None, ckpt_step: int | None) -> _Choice | None:
    if exact is not None and ckpt_step is not None and exact != ckpt_step:
        raise RestoreError(
            f"--load names the commit of rollout {exact}, --ckpt-step is {ckpt_step}.",
            next_step="Leave one of them out.",
        )
    if exact is not None:
        return _Choice(exact, "the file that --load names", "--load")
    return None if ckpt_step is None else _Choice(ckpt_step, "asked for by --ckpt-step", "--ckpt-step")


def _commits_of_line(disk: RunOnDisk, folder: str) -> dict[int, str]:
    """Rollout -> folder of its commit, along the newest branch that has commits in or below a folder."""
    for tip in reversed(disk.branches):
        if not is_below(tip.directory, folder) or not disk.commits.get(tip.directory):
            continue
        directories = {branch.branch: branch.directory for branch in disk.branches}
        found: dict[int, str] = {}
        first = 0
        for name, last in ancestry(disk.branches, tip.branch):
            directory = directories[name]
            reach = [r for r in disk.commits.get(directory, []) if r >= first and (last is None or r <= last)]
            found |= dict.fromkeys(reach, directory)
            first = first if last is None else last + 1
        return found
    return dict.fromkeys(disk.commits.get(folder, []), folder)


def _wanted(disk: RunOnDisk, folder: str, asked: _Choice | None, newest: int) -> tuple[_Choice | None, list[str]]:
    """What flag, file or edited tracker ask for, None for the newest; and words about a tracker that is ignored."""
    tracker = disk.trackers.get(folder)
    edited = None if tracker is None else tracker.edited_to(newest)
    if edited is None:
        return asked, []
    if asked is not None:
        return asked, [f"The tracker, which was edited to {edited}, is ignored: {asked.flag} decides."]
    if not edited.isdigit():
        raise RestoreError(
            f"The tracker in {folder} holds {edited!r}, allowed: the number of a rollout that has a commit.",
            next_step=f"Write {newest} into it for the newest commit, or choose with --ckpt-step.",
        )
    if int(edited) > newest:
        return None, [f"The tracker names rollout {edited}, which has no commit; it is ignored."]
    return _Choice(int(edited), f"the tracker was edited to {edited}"), []


def _not_there(disk: RunOnDisk, folder: Path, chosen: int, there: Sequence[int], why: str | None) -> RestoreError:
    """The refusal of a commit that isn't on the line of the folder."""
    said = f"{folder}: no commit of rollout {chosen}; there are {_listed(there)}" + (f" ({why})." if why else ".")
    files = [name for name in disk.unfinished if Path(name).name in (f"iter_{chosen:07d}", str(chosen))]
    if files:
        said += f" {', '.join(files)} is of a save that was not finished."
    other = [name for name, rollouts in disk.commits.items() if chosen in rollouts]
    if other:
        path = Path(other[-1]) / "rollout" / f"committed_{chosen}.json"
        return RestoreError(said, next_step=f"To go on from the one of another branch, give --load with its {path}.")
    return RestoreError(said, next_step="Choose one of these with --ckpt-step, or leave it out for the newest.")


def _destination(disk: RunOnDisk, source: str, output: str, new_branch: str, *, is_newest: bool) -> str:
    """The folder of the chosen commit where that can go on, else the folder for commits where that is free."""
    if is_newest and is_below(source, output):
        return source
    return output if not disk.commits.get(output) else str(Path(output) / "branches" / new_branch)


def _left_aside(disk: RunOnDisk, chosen: int) -> list[str]:
    """Words about what looks as if one could go on from it."""
    words = []
    if disk.unfinished:
        has, record = ("has", "record") if len(disk.unfinished) == 1 else ("have", "records")
        words.append(f"Ignored: {', '.join(disk.unfinished[-8:])}, which {has} no commit {record}.")
    ended = [branch for branch in disk.branches if not disk.commits.get(branch.directory)]
    if ended and disk.branches[-1] in ended and disk.branches[-1].parent is not None:
        parent = disk.branches[-1].parent
        if parent.rollout_id != chosen:
            words.append(
                f"The newest session began at the commit of rollout {parent.rollout_id} and ended before a commit of "
                f"its own; to go back there again, give --ckpt-step {parent.rollout_id}."
            )
    return words


def _without_commit(disk: RunOnDisk, asked: _Choice | None, folder: Path, output: str) -> RestorePlan:
    if asked is not None:
        next_step = "Check the folder, or leave out --ckpt-step (or the file name in --load) to start anew."
        raise RestoreError(
            f"{folder}: no commit of rollout {asked.rollout}; there is none at all.", next_step=next_step
        )
    words = ["New run."]
    mode = RestoreMode.RESTART if disk.has_queue else RestoreMode.NEW
    if disk.has_queue:
        words = [f"{folder} holds a run without a commit: training starts anew, its accepted groups are kept."]
    elif disk.branches:
        words = [f"{folder} holds a run without a commit, and its groups are gone: it starts anew."]
    return RestorePlan(mode, output, 0, words=[*words, *_left_aside(disk, -1)])


def _listed(rollouts: Sequence[int]) -> str:
    return ", ".join(str(rollout) for rollout in rollouts[-8:])
