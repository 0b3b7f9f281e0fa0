"""Which accepted groups were trained, by which step of which branch: an append-only file with one fsync a record.

straw's consumer state holds only its latest value and its cursor moves back on a resume, so it can't tell the history
of several branches; a log can. A line is `<crc32 hex> <json>`. A last line without its newline was never
acknowledged and is cut off by the next writer; a damaged line before it is refused.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from storage.files import sync_directory
from storage.os_errors import os_error
from vime.errors import CorruptDataError, StorageError


class TrainedRecord(msgspec.Struct, frozen=True):
    """One optimizer step's worth of accepted positions."""

    branch: str
    step: int
    version: int
    """Policy version under which the batch was planned."""
    positions: list[int]


class TrainedLog:
    """The log of one pool; only the holder of the coordinator lock may open it for writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        existed = path.exists()
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            if not existed:
                sync_directory(path.parent)
        except OSError as error:
            raise os_error(error, path, 0) from error
        self._end = 0
        self.records: list[TrainedRecord] = []
        self._by_step: dict[tuple[str, int], TrainedRecord] = {}
        self._step_of: dict[tuple[str, int], int] = {}
        try:
            records, self._end = _parse(path, path.read_bytes())
            self._cut_tail()
        except StorageError:
            self.close()
            raise
        for record in records:
            self._remember(record)

    def append(self, record: TrainedRecord) -> None:
        """Make the record durable; the same record again changes nothing.

        Raises `StorageError` for another record of the same branch and step, or a position that this branch has
        already trained.
        """
        present = self._by_step.get((record.branch, record.step))
        if present == record:
            return
        if present is not None:
            raise StorageError(
                f"{self.path}: step {record.step} of branch {record.branch!r} is recorded with version "
                f"{present.version} and {len(present.positions)} positions, found version {record.version} and "
                f"{len(record.positions)} other positions.",
                next_step="A replayed step must train the groups of its plan; start a new branch to train others.",
            )
        self._check_new(record)
        body = msgspec.json.encode(record)
        line = b"%08x %s\n" % (zlib.crc32(body), body)
        try:
            written = os.write(self._descriptor, line)
            if written != len(line):
                raise OSError(28, f"only {written} of {len(line)} bytes were written")
            os.fsync(self._descriptor)
        except OSError as error:
            self._cut_tail()
            raise os_error(error, self.path, len(line)) from error
        self._end += len(line)
        self._remember(record)

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _check_new(self, record: TrainedRecord) -> None:
        if not record.positions or len(set(record.positions)) != len(record.positions):
            raise StorageError(
                f"step {record.step} of branch {record.branch!r}: positions must be distinct and at least one, "
                f"found {record.positions}."
            )
        for position in record.positions:
            earlier = self._step_of.get((record.branch, position))
            if earlier is not None:
                raise StorageError(
                    f"position {position} was trained by step {earlier} of branch {record.branch!r} and can't be "
                    f"trained again by step {record.step}.",
                    next_step="Plan only positions that this branch has not trained.",
                )

    def _remember(self, record: TrainedRecord) -> None:
        self.records.append(record)
        self._by_step[record.branch, record.step] = record
        self._step_of.update({(record.branch, position): record.step for position in record.positions})

    def _cut_tail(self) -> None:
        if os.fstat(self._descriptor).st_size > self._end:
            os.ftruncate(self._descriptor, self._end)
            os.fsync(self._descriptor)


def read_trained_log(path: Path) -> list[TrainedRecord]:
    """The acknowledged records of a log that someone else may be writing; empty when there is none."""
    return _parse(path, path.read_bytes())[0] if path.exists() else []


def check_positions(positions: Sequence[int], num_accepted: int, what: str) -> None:
    """Raise `StorageError` unless every position is one of the accepted groups."""
    bad = [position for position in positions if not 0 <= position < num_accepted]
    if bad:
        raise StorageError(f"{what}: positions {bad[:5]} are not accepted, allowed: 0..{num_accepted - 1}.")


def _parse(path: Path, data: bytes) -> tuple[list[TrainedRecord], int]:
    """Records and the length of the acknowledged part."""
    end = data.rfind(b"\n") + 1
    records = []
    for number, line in enumerate(data[:end].splitlines(), start=1):
        digest, _, body = line.partition(b" ")
        if digest != b"%08x" % zlib.crc32(body):
            raise CorruptDataError(
                f"{path}:{number}: the checksum is {digest[:16]!r}, expected {b'%08x' % zlib.crc32(body)!r}.",
                next_step="Restore the file from a copy; the queue itself is not affected.",
            )
        try:
            records.append(msgspec.json.decode(body, type=TrainedRecord))
        except msgspec.MsgspecError as error:
            raise CorruptDataError(f"{path}:{number}: not a trained record: {error}.") from error
    return records, end
