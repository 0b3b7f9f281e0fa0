"""What the queue takes prompts from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from vime.data.cursor import PromptCursor, PromptTask
from vime.data.record_files import BadRecord


class PromptStream(Protocol):
    """An endless stream of prompts: what comes after a cursor is always the same."""

    @property
    def bad_records(self) -> Sequence[BadRecord]:
        """Malformed ones that were skipped."""

    @property
    def long_records(self) -> Sequence[BadRecord]:
        """Those that are too long."""

    @property
    def num_records(self) -> int:
        """All, bad and long ones included."""

    def __len__(self) -> int:
        """Prompts in one epoch."""

    def cursor_at(self, group_index: int) -> PromptCursor:
        """The cursor whose next group is `group_index`."""

    def take(self, cursor: PromptCursor, n: int) -> tuple[list[PromptTask], PromptCursor]:
        """The next `n` prompts from `cursor`, and the cursor after them. Raises `DataError`."""

    def where(self, row: int) -> str:
        """Place of a record for messages."""

    def write_bad_records(self, path: Path) -> None:
        """Write bad and long records aside. Raises `DataError`."""

    def dataset_digest(self) -> str:
        """Equal for sources that give equal streams."""

    def save(self, rollout_id: int) -> None:
        """Keep what the cursor doesn't say about the place after a rollout. Raises `DataError`."""
