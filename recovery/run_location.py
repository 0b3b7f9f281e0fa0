"""Where the parts of a run lie, for commands that look into it: found from the run folder alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from recovery.claim import queue_claim_path, read_claim, run_claim_path
from recovery.home import home_of
from storage.dead_letters import letters_folder
from storage.holder import process_lives
from vime.errors import NoRunError, reason_of


class _Data(msgspec.Struct, frozen=True):
    prompt_data: str | None = None


class _Checkpoint(msgspec.Struct, frozen=True):
    hf_checkpoint: str | None = None
    model_name: str | None = None
    keep_checkpoints: int | None = None
    keep_every: int | None = None


class _Queue(msgspec.Struct, frozen=True):
    rollout_data_transport: str = "straw"


class RunSettings(msgspec.Struct, frozen=True):
    """The part of `settings.json` that looking in needs; all None where a run has no such file."""

    data: _Data = _Data()
    checkpoint: _Checkpoint = _Checkpoint()
    queue: _Queue = _Queue()


@dataclass(frozen=True)
class RunLocation:
    """A run and its pool."""

    root: Path
    pool: Path
    settings: RunSettings

    @property
    def dead_letters(self) -> Path:
        """Folder of the samples that failed."""
        return letters_folder(self.root)

    @property
    def has_queue(self) -> bool:
        """Whether there is a queue on the disk."""
        return (self.pool / "vime" / "queue.json").exists()

    @property
    def training_logs(self) -> list[Path]:
        """What each rank says that it trained."""
        return sorted((self.root / "training_log").glob("rank_*.jsonl"))

    @property
    def token_log(self) -> Path:
        """What the trainer made of each token."""
        return self.root / "token_log"

    def driver(self) -> int | None:
        """Process id of the session that is running now on this host, None when none is."""
        path = self.root / "rollout" / "session.lock"
        try:
            text, written = path.read_text(errors="replace").strip(), path.stat().st_mtime
        except OSError:
            return None
        return int(text) if text.isascii() and text.isdigit() and process_lives(int(text), since=written) else None


def locate_run(root: Path, pool: Path | None = None, *, needs_queue: bool = True) -> RunLocation:
    """The run in `root`. Its pool is `pool`, or else the one that the run has claimed, or else in its usual place.

    A folder that holds only checkpoints of a run stands for the run.
    A claimed pool that lay inside the run folder is looked for inside `root` only, so that a copy has its own.

    Raises `NoRunError` when there is no run, or with `needs_queue` no queue of it on the disk.
    """
    root = home_of(root.resolve())
    if not root.is_dir():
        raise NoRunError(f"{root} is no folder.", next_step="Give the --save folder of `vime train`.")
    places = [pool.resolve()] if pool is not None else _usual_pools(root)
    found = next((place for place in places if (place / "vime" / "queue.json").exists()), None)
    known = (root / "settings.json").exists()
    settings = _read_settings(root / "settings.json") if known else RunSettings()
    if found is None and known and not needs_queue:
        return RunLocation(root, places[0], settings)
    if found is None:
        looked = ", ".join(str(place) for place in places)
        transport = settings.queue.rollout_data_transport
        if pool is None and transport != "straw":
            raise NoRunError(
                f"The queue of the run in {root} was in memory (--rollout-data-transport {transport}): there is "
                "nothing to look into.",
                next_step="`vime queue dead RUN` shows its letters; the rest needs --rollout-data-transport straw.",
            )
        raise NoRunError(
            f"{root} holds no run with a queue (looked in {looked}).",
            next_step="Give the --save folder of `vime train`; where the queue lies elsewhere, add --pool "
            "ROLLOUT_DATA_DIR/pool.",
        )
    return RunLocation(root, found, settings)


def prompt_data_of(run: Path) -> str | None:
    """The --prompt-data of the newest session of a run; None where it isn't recorded."""
    try:
        return _read_settings(run / "settings.json").data.prompt_data
    except NoRunError:
        return None


def _usual_pools(root: Path) -> list[Path]:
    default = root / "rollout_data" / "pool"
    ours = read_claim(run_claim_path(root))
    if ours is None:
        return [default]
    claimed, recorded_run = Path(ours.queue), Path(ours.run)
    if claimed.is_relative_to(recorded_run):
        return list(dict.fromkeys([root / claimed.relative_to(recorded_run), default]))
    theirs = read_claim(queue_claim_path(claimed)) if os.access(claimed, os.R_OK) else None
    return [claimed, default] if theirs is not None and theirs.token == ours.token else [default, claimed]


def _read_settings(path: Path) -> RunSettings:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunSettings)
    except (OSError, msgspec.MsgspecError) as error:
        raise NoRunError(f"{path} can't be read: {reason_of(error)}.", next_step="Restore the file.") from error
