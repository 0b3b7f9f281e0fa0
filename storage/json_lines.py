"""Files of one JSON record a line, which a process appends to while others read."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from vime.errors import StorageError

_Record = TypeVar("_Record", bound=msgspec.Struct)


def read_json_lines(path: Path, kind: type[_Record], name: str) -> tuple[_Record, ...]:
    """All records, oldest first; none where there is no file. A last line that is being written is left out.

    `name` is what a line should be, in words. Raises `StorageError` for a file or a line that can't be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}.", next_step="Check the mount and the file's rights.") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(msgspec.json.decode(line, type=kind))
        except msgspec.MsgspecError as error:
            raise StorageError(f"{path}:{number}: not {name} ({error}).", next_step="Remove the line.") from error
    return tuple(records)
