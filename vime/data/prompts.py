"""The prompt source: an endless, deterministic stream of prompt tasks over one file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from vime.data.cursor import PromptCursor, PromptTask, epoch_order
from vime.data.record_files import BadRecord, RecordFile, open_record_file
from vime.data.records import PromptRecord, RecordKeys
from vime.errors import BadRecordError, DataError, SampleError, reason_of

__all__ = ["PromptCursor", "PromptSource", "PromptTask"]

ChatTemplate = Callable[[list[dict[str, Any]]], str]
PROMPT_TOO_LONG = "prompt_too_long"
_BATCH = 1024
_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")


@dataclass(frozen=True)
class PromptLimit:
    """Prompts with more tokens are left out."""

    max_tokens: int
    count_tokens: Callable[[Sequence[PromptRecord]], list[int]]


class PromptSource:
    """Prompts of `path` (a `.jsonl` or `.parquet` fsspec URL, or `reasoning_gym:NAME?seed=0&size=500`).

    `path@[start:stop]` is a slice of its records. `tool_key` names tools, which become `metadata["tools"]`;
    `media_keys` name media by kind. Prompts longer than `limit` are kept in `long_records` and don't count as bad.

    `take` is a function of the cursor alone: the source keeps no position. `apply_chat_template` turns chat
    messages into text; a plain string prompt is given to it as one user message. Each epoch visits every prompt
    once, in file order or, with `shuffle`, in an order that depends on `seed` and the epoch.

    A malformed record raises `BadRecordError` naming file:line:column. With `on_bad_record="skip"` they are kept in
    `bad_records`; more than `max_bad_fraction` of them raises `BadRecordError` all the same.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        input_key: str = "input",
        label_key: str | None = None,
        metadata_key: str | None = "metadata",
        tool_key: str | None = None,
        media_keys: Mapping[str, str] | None = None,
        limit: PromptLimit | None = None,
        apply_chat_template: ChatTemplate | None = None,
        shuffle: bool = False,
        seed: int = 42,
        n_samples_per_prompt: int = 1,
        on_bad_record: Literal["stop", "skip"] = "stop",
        max_bad_fraction: float = 0.5,
    ) -> None:
        self._keys = RecordKeys(input_key, label_key, metadata_key, tool_key, dict(media_keys or {}))
        self._apply_chat_template = apply_chat_template
        self._shuffle, self._seed, self._n_samples = shuffle, seed, n_samples_per_prompt
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None
        file_path, bounds = split_slice(str(path))
        self.bad_records: list[BadRecord] = []
        """Those that were skipped, in file order."""
        self._file: RecordFile = open_record_file(
            file_path, self._keys, self.bad_records.append if on_bad_record == "skip" else _refuse
        )
        self.num_records = self._file.num_records
        """In the file, bad ones included."""
        if len(self.bad_records) > max_bad_fraction * self.num_records:
            first = self.bad_records[0]
            next_step = "Correct the file, or allow more with --rollout-max-failed-fraction."
            raise BadRecordError(
                f"{path}: {len(self.bad_records)} of {self.num_records} records are bad, allowed: a fraction of "
                f"{max_bad_fraction}. The first: {first.message}",
                next_step=first.next_step if first.wrong_flag else next_step,
            )
        if not self._file.num_records:
            raise BadRecordError(f"{path}: the file has no records.", next_step="Check the path, or fill the file.")
        chosen = range(self._file.num_records)[bounds]
        self._rows = np.asarray([row for row in chosen if row not in self._file.bad], np.int64)
        if not self._rows.size:
            raise DataError(
                f"{path}: the slice selects none of {self._file.num_records} records.",
                next_step="Choose rows that the file has, counted from 0, that are not set aside as bad.",
            )
        self.long_records: list[BadRecord] = [] if limit is None else self._set_long_ones_aside(limit)
        """Those of the slice whose prompts are longer than the limit."""
        if not self._rows.size:
            raise DataError(
                f"{path}: every prompt is too long. The first: {self.long_records[0].message}",
                next_step="Raise --rollout-max-prompt-len.",
            )

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._rows)

    def cursor_at(self, group_index: int) -> PromptCursor:
        """The cursor whose next group is `group_index`."""
        epoch, offset = divmod(group_index, len(self))
        return PromptCursor(epoch, offset, group_index, group_index * self._n_samples)

    def take(self, cursor: PromptCursor, n: int) -> tuple[list[PromptTask], PromptCursor]:
        """The next `n` prompts from `cursor`, crossing epochs, and the cursor after them."""
        places: list[tuple[int, int]] = []
        epoch, offset = cursor.epoch, cursor.offset
        while len(places) < n:
            order = self._epoch_rows(epoch)
            part = order[offset : offset + n - len(places)]
            places += [(epoch, int(row)) for row in part]
            offset += len(part)
            if offset >= len(order):
                epoch, offset = epoch + 1, 0
        records = self._file.read([row for _, row in places])
        tasks = [
            PromptTask(
                group_index=cursor.next_group_index + number,
                first_sample_index=cursor.next_sample_index + number * self._n_samples,
                epoch=task_epoch,
                row=row,
                prompt=self._render(record),
                label=record.label,
                metadata=record.metadata,
                media=record.media,
            )
            for number, ((task_epoch, row), record) in enumerate(zip(places, records, strict=True))
        ]
        after = PromptCursor(epoch, offset, cursor.next_group_index + n, cursor.next_sample_index + n * self._n_samples)
        return tasks, after

    def where(self, row: int) -> str:
        """File and line of a record, for messages and lineage."""
        return self._file.where(row)

    def write_bad_records(self, path: Path) -> None:
        """Write bad and long records aside as JSON lines: where (file:line:column), reason, text."""
        lines = [
            json.dumps({"where": record.where, "reason": record.reason, "text": record.text})
            for record in [*self.bad_records, *self.long_records]
        ]
        try:
            path.write_text("".join(f"{line}\n" for line in lines))
        except OSError as error:
            raise DataError(
                f"{path}: can't write the bad records aside: {reason_of(error)}.",
                next_step="Check the mount and the folder's rights, or give another --save.",
            ) from error

    def dataset_digest(self) -> str:
        """Hex SHA-256 over the file's bytes, the rows in use and the keys; equal digests give equal streams under
        equal shuffle, seed and group size."""
        parts = {
            "file": self._file.digest,
            "rows": hashlib.sha256(self._rows.astype("<i8").tobytes()).hexdigest(),
            "keys": msgspec.structs.asdict(self._keys),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def save(self, rollout_id: int) -> None:
        """Keep what the cursor doesn't say about the place after a rollout: nothing."""

    def _set_long_ones_aside(self, limit: PromptLimit) -> list[BadRecord]:
        """Take the rows of long prompts out of the stream."""
        kept, long = [], []
        for start in range(0, len(self._rows), _BATCH):
            rows = self._rows[start : start + _BATCH].tolist()
            records = self._file.read(rows)
            for row, record, num_tokens in zip(rows, records, self._counted(limit, rows, records), strict=True):
                if num_tokens <= limit.max_tokens:
                    kept.append(row)
                else:
                    long.append(_long(self._file.where(row), record, num_tokens, limit.max_tokens))
        self._rows = np.asarray(kept, np.int64)
        return long

    def _counted(self, limit: PromptLimit, rows: Sequence[int], records: Sequence[PromptRecord]) -> list[int]:
        """Tokens of each prompt. Raises `BadRecordError` for the first that can't be rendered."""
        try:
            return limit.count_tokens(records)
        except SampleError as error:
            if len(records) > 1:
                for row, record in zip(rows, records, strict=True):
                    self._counted(limit, [row], [record])
            raise BadRecordError(f"{self._file.where(rows[0])}: {error.message}", next_step=error.next_step) from error

    def _epoch_rows(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            order = epoch_order(len(self._rows), shuffle=self._shuffle, seed=self._seed, epoch=epoch)
            self._order = (epoch, self._rows[order])
        return self._order[1]

    def _render(self, record: PromptRecord) -> str | list[dict[str, Any]]:
        if self._apply_chat_template is None:
            return record.prompt
        if isinstance(record.prompt, str):
            return self._apply_chat_template([{"role": "user", "content": record.prompt}])
        return self._apply_chat_template(record.prompt)


def split_slice(path: str) -> tuple[str, slice]:
    """`path@[start:stop]` as file and slice. Raises `DataError`."""
    match = _SLICE.fullmatch(path)
    if match is None:
        if "@[" in path:
            raise DataError(
                f"{path}: can't read the slice, allowed: path@[start:stop] with whole numbers.",
                next_step="Correct the slice.",
            )
        return path, slice(None)
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    return match["path"], slice(start, stop)


def _long(where: str, record: PromptRecord, num_tokens: int, max_tokens: int) -> BadRecord:
    return BadRecord(
        f"{where}: the prompt has {num_tokens} tokens, allowed: {max_tokens}.",
        where=where,
        reason=f"{PROMPT_TOO_LONG}: {num_tokens} tokens, allowed: {max_tokens}",
        text=record.prompt if isinstance(record.prompt, str) else json.dumps(record.prompt),
    )


def _refuse(record: BadRecord) -> None:
    raise record
