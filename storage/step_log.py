"""What was planned and what was trained, by which step of which branch: append-only files, one fsync a record.

straw's consumer state holds only its latest value, moves back on a resume and knows one segment; a log can hold the
history of several branches over all segments. A rotation begins a new file with what the branch had trained so far,
so only the newest file is ever read; the older ones stay. A line is `<crc32 hex> <json>`. A last line without
its newline was never acknowledged and is cut off by the next writer; a damaged line before it is refused.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from storage.files import sync_directory, write_atomically
from storage.os_errors import os_error
from storage.positions import PositionRanges
from storage.queue_types import PlanRecord
from vime.errors import CorruptDataError, StorageError

MAX_LOG_BYTES = 64 * 2**10
"""A rotation begins a new file when the newest one is so long."""
_FIRST = "trained.jsonl"
_LATER = re.compile(r"trained_(\d+)\.jsonl")


class TrainedRecord(msgspec.Struct, frozen=True):
    """One rollout batch's worth of accepted positions."""

    branch: str
    step: int
    version: int
    """Policy version under which the batch was planned."""
    positions: list[int]


class Opening(msgspec.Struct, frozen=True):
    """First line of every file but the first: what the files before it add up to."""

    branch: str
    """The branch whose commit the rotation followed."""
    trained: list[tuple[int, int]]
    """Positions that its commit calls trained, its ancestors' included, as ranges."""
    highest_version: int
    """Newest policy version under which any branch had trained."""


_Line = TrainedRecord | PlanRecord | Opening
_KINDS: dict[str, type[_Line]] = {"trained": TrainedRecord, "planned": PlanRecord, "opening": Opening}


class _Kind(msgspec.Struct, frozen=True):
    kind: str = "trained"


class StepLog:
    """The log of one pool; only the holder of the coordinator lock may open it."""

    def __init__(self, folder: Path) -> None:
        """Open the newest file in `folder`, or make the first. Raises `StorageError`."""
        self._folder = folder
        self._descriptor = -1
        self._open(log_files(folder)[-1])

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
        self._write(record)

    def append_plan(self, plan: PlanRecord) -> None:
        """Make a plan durable; the same plan again changes nothing. Raises `StorageError` for another of its id."""
        present = self.plans.get(plan.batch_id)
        if present is None:
            self._write(plan)
        elif present != plan:
            raise StorageError(
                f"record plan {plan.batch_id}: it is recorded with {len(present.positions)} positions and digest "
                f"{present.plan_ref.digest[:12]}, found {len(plan.positions)} positions and digest "
                f"{plan.plan_ref.digest[:12]}.",
                next_step="Train the plan that was recorded, or start a new branch.",
            )

    def trained_by(self, branch: str) -> PositionRanges:
        """What a branch has trained since it began, or, after a rotation of its own, since the run began.

        A branch that has rotated is known in full only while it is the newest one to have done so.
        """
        known = self._opening.trained if self._opening is not None and self._opening.branch == branch else []
        result = PositionRanges(known)
        for record in self.records:
            if record.branch == branch:
                result.update(record.positions)
        return result

    def rotate(self, branch: str, trained: PositionRanges) -> None:
        """Begin a new file that stands for all before it, unless the newest is still small.

        Records of `branch` that go beyond `trained` are taken over; those of other branches and all plans are not,
        since no session goes on with them. Raises `StorageError`.
        """
        if self._end < MAX_LOG_BYTES:
            return
        opening = Opening(branch, trained.ranges(), self.highest_version)
        kept = [
            record
            for record in self.records
            if record.branch == branch and not all(position in trained for position in record.positions)
        ]
        files = log_files(self._folder)
        path = self._folder / f"trained_{_number(files[-1]) + 1:06d}.jsonl"
        content = _encode(opening) + b"".join(map(_encode, kept))
        try:
            write_atomically(path, content)
        except OSError as error:
            raise os_error(error, path, len(content)) from error
        self.close()
        self._open(path)

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self, path: Path) -> None:
        self.path = path
        self.records: list[TrainedRecord] = []
        self.plans: dict[str, PlanRecord] = {}
        self.highest_version = 0
        self._opening: Opening | None = None
        self._trained_before = PositionRanges()
        self._by_step: dict[tuple[str, int], TrainedRecord] = {}
        self._step_of: dict[tuple[str, int], int] = {}
        existed = path.exists()
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            if not existed:
                sync_directory(path.parent)
        except OSError as error:
            raise os_error(error, path, 0) from error
        try:
            lines, self._end = _parse(path, path.read_bytes())
            self._cut_tail()
        except StorageError:
            self.close()
            raise
        for line in lines:
            self._remember(line)

    def _check_new(self, record: TrainedRecord) -> None:
        if not record.positions or len(set(record.positions)) != len(record.positions):
            raise StorageError(
                f"step {record.step} of branch {record.branch!r}: positions must be distinct and at least one, "
                f"found {record.positions}."
            )
        rotated = self._opening is not None and self._opening.branch == record.branch
        for position in record.positions:
            step = self._step_of.get((record.branch, position))
            if step is not None or (rotated and position in self._trained_before):
                when = "by an earlier step" if step is None else f"by step {step}"
                raise StorageError(
                    f"position {position} was trained {when} of branch {record.branch!r} and can't be "
                    f"trained again by step {record.step}.",
                    next_step="Plan only positions that this branch has not trained.",
                )

    def _write(self, line: _Line) -> None:
        content = _encode(line)
        try:
            self._cut_tail()  # what is left of a record that failed, and whose remains could not be cut off
            written = os.write(self._descriptor, content)
            if written != len(content):
                raise OSError(28, f"only {written} of {len(content)} bytes were written")
            os.fsync(self._descriptor)
        except OSError as error:
            with suppress(OSError):  # the next record does it
                self._cut_tail()
            raise os_error(error, self.path, len(content)) from error
        self._end += len(content)
        self._remember(line)

    def _remember(self, line: _Line) -> None:
        match line:
            case TrainedRecord():
                self.records.append(line)
                self._by_step[line.branch, line.step] = line
                self._step_of.update({(line.branch, position): line.step for position in line.positions})
                self.highest_version = max(self.highest_version, line.version)
            case PlanRecord():
                self.plans[line.batch_id] = line
            case Opening():
                self._opening = line
                self._trained_before = PositionRanges(line.trained)
                self.highest_version = line.highest_version

    def _cut_tail(self) -> None:
        if os.fstat(self._descriptor).st_size > self._end:
            os.ftruncate(self._descriptor, self._end)
            os.fsync(self._descriptor)


def log_files(folder: Path) -> list[Path]:
    """The files of a pool's step log, oldest first; at least the first, which may not exist yet."""
    later = sorted((path for path in folder.glob("trained_*.jsonl") if _LATER.fullmatch(path.name)), key=_number)
    return [folder / _FIRST, *later]


def read_step_log(folder: Path) -> list[TrainedRecord | PlanRecord]:
    """Every acknowledged record of a log that someone else may be writing, oldest first; empty when there is none.

    Raises `CorruptDataError`, and `StorageError` for a file that can't be read.
    """
    lines: Iterable[_Line] = (
        line for path in log_files(folder) if path.exists() for line in _parse(path, _content(path))[0]
    )
    return [line for line in lines if not isinstance(line, Opening)]


def trained_on_disk(folder: Path, branch: str) -> PositionRanges:
    """As `StepLog.trained_by`, of a log that someone else may be writing; reads its newest file only.

    Raises `CorruptDataError`.
    """
    path = log_files(folder)[-1]
    trained = PositionRanges()
    for line in _parse(path, _content(path))[0] if path.exists() else []:
        if isinstance(line, Opening) and line.branch == branch:
            trained = PositionRanges([*line.trained, *trained.ranges()])
        elif isinstance(line, TrainedRecord) and line.branch == branch:
            trained.update(line.positions)
    return trained


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}.", next_step="Check the mount and the file's rights.") from error


def _number(path: Path) -> int:
    match = _LATER.fullmatch(path.name)
    return 0 if match is None else int(match.group(1))


def _encode(line: _Line) -> bytes:
    kind = next(name for name, known in _KINDS.items() if isinstance(line, known))
    body = msgspec.json.encode({"kind": kind, **msgspec.structs.asdict(line)})
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _parse(path: Path, data: bytes) -> tuple[list[_Line], int]:
    """Lines and the length of the acknowledged part."""
    end = data.rfind(b"\n") + 1
    lines: list[_Line] = []
    for number, line in enumerate(data[:end].splitlines(), start=1):
        digest, _, body = line.partition(b" ")
        if digest != b"%08x" % zlib.crc32(body):
            raise CorruptDataError(
                f"{path}:{number}: the checksum is {digest[:16]!r}, expected {b'%08x' % zlib.crc32(body)!r}.",
                next_step="Restore the file from a copy; the queue itself is not affected.",
            )
        try:
            kind = _KINDS[msgspec.json.decode(body, type=_Kind).kind]
            lines.append(msgspec.json.decode(body, type=kind))
        except (msgspec.MsgspecError, KeyError) as error:
            raise CorruptDataError(f"{path}:{number}: not a record of the step log: {error}.") from error
    return lines, end
