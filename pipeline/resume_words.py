"""What a start says of the run that it goes on with, before it acts."""

from __future__ import annotations

from pipeline.changed_settings import consequences
from pipeline.replay.source import read_session_settings
from pipeline.run_folder import RunFolder
from pipeline.session_start import Start
from recovery.branch import read_branches
from recovery.outlook import Outlook, look_ahead
from recovery.restore import RestoreMode
from vime.errors import NoRunError, StorageError
from vime.settings.groups import Settings


def resume_words(settings: Settings, folder: RunFolder, start: Start) -> list[str]:
    """The plan, the groups before and after it, and what follows from settings that have changed.

    Raises `RestoreError` for a change that the run doesn't allow.
    """
    words = list(start.plan.words)
    if start.plan.mode not in (RestoreMode.RESUME, RestoreMode.RESTART):
        return words
    outlook = _outlook(settings, folder, start, words)
    if outlook is not None:
        words += outlook.words()
    branches = read_branches(folder.root)
    before = start.commit.branch if start.commit is not None else branches[-1].branch if branches else None
    if before is None:
        return words
    try:
        ran_with = read_session_settings(folder.root, before)
    except NoRunError as error:
        return [*words, f"Settings are not compared with those of before: {error.message}"]
    num_waiting = 0 if outlook is None else outlook.num_waiting
    changed = consequences(ran_with, settings, num_waiting=num_waiting, has_commit=start.commit is not None)
    return [*words, *changed]


def _outlook(settings: Settings, folder: RunFolder, start: Start, words: list[str]) -> Outlook | None:
    """What waits in the queue; words say so where it can't be told before the coordinator has repaired it."""
    if settings.queue.is_in_memory:
        return None
    trained = [] if start.state is None else start.state.trained
    try:
        return look_ahead(folder.root, folder.queue, read_branches(folder.root), trained)
    except StorageError as error:
        words.append(f"The queue is counted once it is open: {error.message}")
        return None
