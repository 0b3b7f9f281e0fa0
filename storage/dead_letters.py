"""What could not be trained: failing samples with their reason, their trace and their content.

One folder a run, one file a writing process (`<worker>-<random>.jsonl`), one line a letter, synced before the queue
is told. Letters are evidence: the queue alone decides whether a group is dropped.
"""

from __future__ import annotations

import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from storage.files import append_durably, make_folder
from storage.plain_json import to_plain_json
from storage.refs import PoolRef
from vime.errors import StorageError, VimeError
from vime.utils.types import Sample

LETTER_VERSION = 1


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """One failure of one attempt at a group."""

    letter_id: str
    time_s: float
    """Unix seconds."""
    worker: str
    group_index: int
    attempt: int
    """Number of the group's lease, from 1."""
    sample_indices: list[int]
    """The samples that failed; all of the group where the failure is of no single one."""
    reason: str
    """The word that such failures are counted under."""
    error: str
    """Type of the exception."""
    message: str
    traceback: str | None = None
    """With its causes; None where a check of vime's own found the fault and the message says all."""
    prompt_ref: PoolRef | None = None
    payload_ref: PoolRef | None = None
    """The failed samples as a stored group, where they could be encoded."""
    samples: list[dict[str, Any]] | None = None
    """The failed samples as `to_plain_json` makes them, where they could not."""
    version: int = LETTER_VERSION


@dataclass(frozen=True)
class UnreadableLine:
    """A line of a letter file that is damaged or of a newer version."""

    path: Path
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


class DeadLetterBox:
    """Where one process writes its letters. Thread-safe; the file is made with the first."""

    def __init__(self, folder: Path, worker: str) -> None:
        """`folder` is that of the run's letters."""
        self._worker = worker
        self.path = folder / f"{worker}-{uuid.uuid4().hex[:8]}.jsonl"
        self._turn = threading.Lock()

    def put(
        self,
        error: Exception,
        *,
        reason: str,
        group_index: int,
        attempt: int,
        samples: Sequence[Sample],
        prompt_ref: PoolRef | None,
        payload_ref: PoolRef | None,
    ) -> DeadLetter:
        """Make a letter durable. Without `payload_ref` it holds the samples itself. Raises `StorageError`."""
        letter = DeadLetter(
            letter_id=uuid.uuid4().hex,
            time_s=time.time(),
            worker=self._worker,
            group_index=group_index,
            attempt=attempt,
            sample_indices=[sample.index for sample in samples if sample.index is not None],
            reason=reason,
            error=type(error).__name__,
            message=to_plain_json(error.message if isinstance(error, VimeError) else str(error)),
            traceback=_trace(error),
            prompt_ref=prompt_ref,
            payload_ref=payload_ref,
            samples=[to_plain_json(sample) for sample in samples] if payload_ref is None else None,
        )
        make_folder(self.path.parent)
        line = msgspec.json.encode(letter)
        with self._turn:
            append_durably(self.path, line)
        return letter


def letters_folder(run: Path) -> Path:
    """The folder of a run's letters; it doesn't exist before the first."""
    return run / "dead_letters"


def read_letters(folder: Path) -> tuple[list[DeadLetter], list[UnreadableLine]]:
    """All letters, oldest first, while others may be written; and the lines that can't be read.

    A last line without its newline is still being written, or was cut off by a crash: it counts as neither.
    """
    letters: list[DeadLetter] = []
    unreadable: list[UnreadableLine] = []
    for path in sorted(folder.glob("*.jsonl")):
        for entry in _read_file(path):
            if isinstance(entry, DeadLetter):
                letters.append(entry)
            else:
                unreadable.append(entry)
    return sorted(letters, key=lambda letter: letter.time_s), unreadable


def _read_file(path: Path) -> Iterator[DeadLetter | UnreadableLine]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}.", next_step="Check the mount and the file's rights.") from error
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            letter = msgspec.json.decode(line, type=DeadLetter)
        except msgspec.MsgspecError as error:
            yield UnreadableLine(path, number, f"not a dead letter ({error})")
            continue
        if letter.version > LETTER_VERSION:
            yield UnreadableLine(path, number, f"version {letter.version}, this vime reads up to {LETTER_VERSION}")
        else:
            yield letter


def _trace(error: Exception) -> str | None:
    if isinstance(error, VimeError) and error.__cause__ is None:
        return None
    text: str = to_plain_json("".join(traceback.format_exception(error)))
    return text
