"""Prompt files by record: JSON lines through an index of byte offsets, Parquet as an Arrow table.

Paths are fsspec URLs. The whole file is checked when it is opened, so a bad record stops a run at its start.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import fsspec
import pyarrow
import pyarrow.parquet

from vime.data.gym import GYM_PREFIX, GymTasks
from vime.data.records import PromptRecord, RecordFault, RecordKeys, read_record
from vime.data.strict_json import JsonFault, key_column, loads_strict
from vime.errors import BadRecordError, DataError, reason_of

_BOM = b"\xef\xbb\xbf"
_CHUNK = 1 << 20
_BATCH = 1024


class BadRecord(BadRecordError):
    """A record that can't be used: `where` is file:line:column, `text` the record itself."""

    def __init__(
        self,
        message: str,
        *,
        next_step: str = "",
        where: str = "",
        reason: str = "",
        text: str = "",
        wrong_flag: str = "",
    ) -> None:
        super().__init__(message, next_step=next_step)
        self.wrong_flag = wrong_flag
        self.where = where
        self.reason = reason
        self.text = text


OnBad = Callable[[BadRecord], None]
"""Called with each bad record; raises to refuse it."""


class RecordFile(Protocol):
    """Records of one file by number. Records that were set aside keep their numbers."""

    num_records: int
    bad: set[int]
    """Numbers of the records that were set aside."""
    digest: str
    """Hex SHA-256 of the file's bytes."""

    def read(self, rows: Sequence[int]) -> list[PromptRecord]:
        """The records with these numbers, in this order."""

    def where(self, row: int) -> str:
        """Place of a record for messages."""


def open_record_file(path: str, keys: RecordKeys, on_bad: OnBad) -> RecordFile:
    """Check and index a `.jsonl` or `.parquet` file, or make the tasks of `reasoning_gym:NAME`.

    Raises `DataError` for a file that isn't there or can't be reached, `BadRecordError` for what it holds.
    """
    if path.startswith(GYM_PREFIX):
        return GymFile(path)
    kinds: dict[str, type[JsonlFile] | type[ParquetFile]] = {".jsonl": JsonlFile, ".parquet": ParquetFile}
    kind = next((kind for suffix, kind in kinds.items() if path.endswith(suffix)), None)
    if kind is None:
        raise DataError(f"{path}: unknown kind of prompt file, allowed: {', '.join(kinds)}.", next_step="Convert it.")
    try:
        filesystem, inner = fsspec.core.url_to_fs(path)
        _refuse_no_file(path, filesystem, inner)
        return kind(path, filesystem, inner, keys, on_bad)
    except pyarrow.ArrowInvalid as error:
        raise BadRecordError(f"{path}: can't be read: {reason_of(error)}.", next_step="Restore the file.") from error
    except (OSError, ValueError, ImportError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: can't be read: {reason_of(error)}.", next_step="Check the path.") from error


def _refuse_no_file(path: str, filesystem: fsspec.AbstractFileSystem, inner: str) -> None:
    """Raise `DataError` unless there is a file; for one elsewhere also with what kept it from being reached."""
    try:
        kind = filesystem.info(inner)["type"]
    except FileNotFoundError as error:
        cause = error.__cause__
        if cause is None or "://" not in path:
            raise DataError(f"{path}: no such file.", next_step="Check the path.") from error
        raise DataError(
            f"{path}: can't be fetched: {reason_of(cause)}.",
            next_step="Check the address and that this machine reaches it, or copy the file here.",
        ) from error
    if kind != "file":
        raise DataError(f"{path}: no file but a {kind}.", next_step="Check the path.")


def record_places(path: str, rows: Sequence[int]) -> dict[int, str]:
    """Record number -> file:line (Parquet: file:row), without checking the records. Raises `DataError`.

    A record that the file doesn't have (any more) is left out.
    """
    if path.startswith(GYM_PREFIX):
        return {row: f"{path}: task {row}" for row in rows}
    if path.endswith(".parquet"):
        return {row: f"{path}:row {row}" for row in rows}
    wanted, record = set(rows), 0
    places: dict[int, str] = {}
    try:
        with fsspec.open(path, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                if len(places) == len(wanted):
                    break
                if line.removeprefix(_BOM).strip() if number == 1 else line.strip():
                    if record in wanted:
                        places[record] = f"{path}:{number}"
                    record += 1
    except (OSError, ValueError, ImportError) as error:
        raise DataError(
            f"{path}: can't be read: {reason_of(error)}.", next_step="Check that the prompt file is there."
        ) from error
    return places


class GymFile:
    """Tasks of reasoning-gym. A record is the question, with the answer for its label; none is ever bad."""

    def __init__(self, path: str) -> None:
        self._path, self._tasks = path, GymTasks(path)
        self.num_records = len(self._tasks)
        self.bad: set[int] = set()
        self.digest = hashlib.sha256(self._tasks.identity.encode()).hexdigest()

    def read(self, rows: Sequence[int]) -> list[PromptRecord]:
        return [self._record(row) for row in rows]

    def where(self, row: int) -> str:
        return f"{self._path}: task {row}"

    def _record(self, row: int) -> PromptRecord:
        question, answer = self._tasks.task(row)
        return PromptRecord(question, answer, {"reasoning_gym": {"tasks": self._tasks.name, "row": row}})


class JsonlFile:
    """JSON lines; empty lines don't count as records."""

    def __init__(self, path: str, filesystem: Any, inner: str, keys: RecordKeys, on_bad: OnBad) -> None:
        self._path, self._filesystem, self._inner, self._keys = path, filesystem, inner, keys
        self._extents: list[tuple[int, int, int]] = []
        """(offset, bytes, line number) of each record."""
        self.bad: set[int] = set()
        digest, offset = hashlib.sha256(), 0
        with filesystem.open(inner, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                digest.update(line)
                skipped = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
                if line[skipped:].strip():
                    self._extents.append((offset + skipped, len(line) - skipped, number))
                    self._check(line[skipped:], on_bad)
                offset += len(line)
        self.num_records = len(self._extents)
        self.digest = digest.hexdigest()

    def read(self, rows: Sequence[int]) -> list[PromptRecord]:
        extents = [self._extents[row] for row in rows]
        return [self._parse(line, number) for line, (_, _, number) in zip(self._lines(extents), extents, strict=True)]

    def where(self, row: int) -> str:
        return f"{self._path}:{self._extents[row][2]}"

    def _lines(self, extents: Sequence[tuple[int, int, int]]) -> list[bytes]:
        """Bytes of the records with these offsets and lengths. Raises `DataError` where the file is gone."""
        lines = []
        try:
            with self._filesystem.open(self._inner, "rb") as stream:
                for offset, num_bytes, _ in extents:
                    stream.seek(offset)
                    lines.append(stream.read(num_bytes))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self._path}: can't be read any more: {reason_of(error)}.",
                next_step="Restore the file, or copy it to this machine.",
            ) from error
        return lines

    def _check(self, line: bytes, on_bad: OnBad) -> None:
        row = len(self._extents) - 1
        try:
            self._parse(line, self._extents[row][2])
        except BadRecord as error:
            on_bad(error)
            self.bad.add(row)

    def _parse(self, line: bytes, number: int) -> PromptRecord:
        text = line.rstrip(b"\r\n")
        try:
            return read_record(loads_strict(text), self._keys)
        except JsonFault as fault:
            ended = line.endswith(b"\n")
            reason = fault.reason if ended else f"{fault.reason}; the last line has no newline and may be cut off"
            raise _bad(f"{self._path}:{number}:{fault.column}", reason, text) from fault
        except RecordFault as fault:
            column = key_column(text.decode(), fault.key) if fault.key else 1
            flag = fault.flag if number == self._extents[0][2] else ""
            raise _bad(f"{self._path}:{number}:{column}", fault.reason, text, wrong_flag=flag) from fault


class ParquetFile:
    """Parquet; only the columns that are asked for are held, as Arrow buffers."""

    def __init__(self, path: str, filesystem: Any, inner: str, keys: RecordKeys, on_bad: OnBad) -> None:
        self._path, self._keys = path, keys
        digest = hashlib.sha256()
        with filesystem.open(inner, "rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
        self.digest = digest.hexdigest()
        self.bad: set[int] = set()
        with filesystem.open(inner, "rb") as stream:
            file = pyarrow.parquet.ParquetFile(stream)
            names = file.schema_arrow.names
            for flag, key in keys.required.items():
                if key not in names:
                    raise DataError(
                        f"{path}: no column {key!r}; the file has {sorted(names)}.",
                        next_step=f"Correct {flag}: it must name a column.",
                    )
            self._table = file.read(columns=[name for name in names if name in keys.all])
        self.num_records = self._table.num_rows
        for start in range(0, self.num_records, _BATCH):
            for row, value in enumerate(self._table.slice(start, _BATCH).to_pylist(), start=start):
                self._check(row, value, on_bad)

    def read(self, rows: Sequence[int]) -> list[PromptRecord]:
        return [self._parse(row, self._table.slice(row, 1).to_pylist()[0]) for row in rows]

    def where(self, row: int) -> str:
        return f"{self._path}:row {row}"

    def _check(self, row: int, value: object, on_bad: OnBad) -> None:
        try:
            self._parse(row, value)
        except BadRecord as error:
            on_bad(error)
            self.bad.add(row)

    def _parse(self, row: int, value: object) -> PromptRecord:
        try:
            return read_record(value, self._keys)
        except RecordFault as fault:
            place = f"{self.where(row)}:{fault.key}" if fault.key else self.where(row)
            raise _bad(place, fault.reason, str(value).encode()) from fault


def _bad(where: str, reason: str, text: bytes, *, wrong_flag: str = "") -> BadRecord:
    """`wrong_flag` names a key that already the first record lacks: the flag is wrong, not the record."""
    next_step = "Correct the record, or set bad records aside with --bad-prompt-records skip."
    if wrong_flag:
        next_step = f"Correct {wrong_flag}: it must name a key of the records."
    return BadRecord(
        f"{where}: {reason}.",
        next_step=next_step,
        wrong_flag=wrong_flag,
        where=where,
        reason=reason,
        text=text.decode(errors="replace"),
    )
