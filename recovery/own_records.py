"""Small files of a run folder that hold one JSON record each."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from vime.errors import RestoreError, reason_of

_Record = TypeVar("_Record", bound=msgspec.Struct)


def read_own_record(path: Path, kind: type[_Record], *, next_step: str = "Restore the file.") -> _Record:
    """Raises `RestoreError` for a file that can't be read, or holds something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise RestoreError(f"{path}: damaged ({reason_of(error)}).", next_step=next_step) from error
