"""A journal whose end is damaged (zeros or garbage, as a power loss can leave it) is cut back to its last whole frame.

straw itself repairs only an end that is too short. A frame is one transaction: the magic `SLMTXN01`, its number and
length (u64, little endian), SHA-256 of these 24 bytes, the events as JSON, SHA-256 of all that, and `SLMTEND1`.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from pathlib import Path

import msgspec

from storage.files import append_durably, write_atomically
from storage.os_errors import os_error
from vime.errors import CorruptDataError

_MAGIC, _END = b"SLMTXN01", b"SLMTEND1"
_HEAD = struct.Struct("<8sQQ32s")
_DIGESTED = 24
"""Bytes of the head that its digest covers."""


class Repair(msgspec.Struct, frozen=True):
    """One line of `vime/repairs.jsonl`: what was cut off a journal."""

    journal: str
    at: float
    """Unix seconds."""
    num_transactions: int
    """Whole transactions that stayed."""
    kept_bytes: int
    cut_bytes: int
    cut_to: str
    """File that holds the bytes that were cut off."""

    def __str__(self) -> str:
        return (
            f"{self.journal}: the last {self.cut_bytes} bytes were damaged and are now in {self.cut_to}; "
            f"{self.num_transactions} transactions ({self.kept_bytes} bytes) stay. What the damaged ones recorded is "
            "undone: groups that they accepted will be generated again."
        )


def cut_damaged_tail(journal: Path, control_dir: Path) -> Repair | None:
    """Cut a journal back to its last whole transaction; None when it is whole, so that its damage is not of this kind.

    The bytes that are cut off stay in a file of their own, and `repairs.jsonl` in `control_dir` gets a line before
    the journal changes. Raises `CorruptDataError` for damage with a whole transaction after it: nothing is cut then.
    """
    try:
        data = journal.read_bytes()
        num_transactions, end = _whole_part(data)
        if end == len(data):
            return None
        later = _later_frame(data, end)
        if num_transactions == 0 or later is not None:
            where = "before its first whole transaction" if num_transactions == 0 else f"with a whole one at {later}"
            raise CorruptDataError(
                f"{journal}: the transaction at byte {end} of {len(data)} is damaged, {where}; "
                "only a damaged end can be cut off.",
                next_step="Restore the journal from a copy.",
            )
        cut = data[end:]
        side = control_dir / "cut" / f"{journal.parents[1].name[:16]}_{end}_{hashlib.sha256(cut).hexdigest()[:8]}"
        side.parent.mkdir(exist_ok=True)
        write_atomically(side, cut)
        repair = Repair(str(journal), time.time(), num_transactions, end, len(cut), str(side))
        append_durably(control_dir / "repairs.jsonl", msgspec.json.encode(repair))
        with journal.open("rb+") as file:
            file.truncate(end)
            os.fsync(file.fileno())
    except OSError as error:
        raise os_error(error, journal, 0) from error
    return repair


def _whole_part(data: bytes) -> tuple[int, int]:
    """How many whole transactions a journal begins with, and where they end."""
    number, end = 0, 0
    while (following := _frame_end(data, end, number)) is not None:
        number, end = number + 1, following
    return number, end


def _later_frame(data: bytes, start: int) -> int | None:
    """Where the next whole frame begins, whatever its number; None when there is none."""
    while (start := data.find(_MAGIC, start)) >= 0:
        if _frame_end(data, start, None) is not None:
            return start
        start += 1
    return None


def _frame_end(data: bytes, start: int, number: int | None) -> int | None:
    """End of the frame that begins at `start`; None when it is not whole, or not the one with this number."""
    if start + _HEAD.size > len(data):
        return None
    magic, found, length, digest = _HEAD.unpack_from(data, start)
    if magic != _MAGIC or hashlib.sha256(data[start : start + _DIGESTED]).digest() != digest:
        return None
    if number is not None and found != number:
        return None
    body_end: int = start + _HEAD.size + length
    end = body_end + hashlib.sha256().digest_size + len(_END)
    if data[body_end:end] != hashlib.sha256(data[start:body_end]).digest() + _END:
        return None
    return end
