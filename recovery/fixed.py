"""What a run's queue is built from: settings that can't change while the run lives."""

from __future__ import annotations

from pathlib import Path

import msgspec

from recovery.own_records import read_own_record
from recovery.run_location import prompt_data_of
from storage.files import write_once
from vime.errors import RestoreError


class FixedSettings(msgspec.Struct, frozen=True):
    """The data behind the prompt cursor, the size of a group, and what keeps the groups."""

    run_id: str
    dataset_digest: str
    n_samples_per_prompt: int
    rollout_shuffle: bool
    rollout_seed: int
    transport: str = "straw"


_FLAGS = {
    "run_id": "--rollout-queue-run-id",
    "n_samples_per_prompt": "--n-samples-per-prompt",
    "rollout_shuffle": "--rollout-shuffle",
    "rollout_seed": "--rollout-seed",
    "transport": "--rollout-data-transport",
}


DIGITS = 12
"""Of digests in messages."""


def fixed_path(run: Path) -> Path:
    return run / "rollout" / "fixed.json"


def hold_to_fixed(run: Path, settings: FixedSettings) -> None:
    """Record the settings at a run's first start; later, refuse others.

    Raises:
        RestoreError: a setting differs; the message names the flag and both values.
    """
    if fixed_path(run).exists():
        refuse_changed(run, settings)
    else:
        write_once(fixed_path(run), msgspec.json.encode(settings))


def refuse_changed(run: Path, settings: FixedSettings) -> None:
    """Refuse settings that differ from those that the run in `run` was started with, if there is one; reads only.

    Raises:
        RestoreError: as `hold_to_fixed`.
    """
    path = fixed_path(run)
    if not path.exists():
        return
    started_with = read_own_record(path, FixedSettings)
    before, now = msgspec.structs.asdict(started_with), msgspec.structs.asdict(settings)
    changed = [
        f"{flag} is {now[name]}, was {before[name]}" for name, flag in _FLAGS.items() if now[name] != before[name]
    ]
    if settings.dataset_digest != started_with.dataset_digest:
        changed.insert(0, _other_data(run, settings.dataset_digest, started_with.dataset_digest))
    if changed:
        raise RestoreError(
            f"{run} holds a run that was started otherwise: {'; '.join(changed)}.",
            next_step="Give the old values, or start a new run in another --save.",
        )


def _other_data(run: Path, now: str, before: str) -> str:
    """That file, rows or keys give other prompts, with the file that the newest session read where that is known."""
    file = prompt_data_of(run)
    known = "" if file is None else f", of {file}"
    return (
        f"--prompt-data and its keys give other prompts (digest {now[:DIGITS]}, was {before[:DIGITS]}{known}); a file "
        "with the same bytes may lie anywhere"
    )
