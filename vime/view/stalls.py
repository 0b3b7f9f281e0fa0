"""`stalls.jsonl`: when a run noticed that nothing went on, and who waited for whom."""

from __future__ import annotations

from pathlib import Path

import msgspec

from vime.errors import StorageError


class Stall(msgspec.Struct, frozen=True):
    """One line."""

    time_s: float
    """Unix time at which it was noticed."""
    quiet_s: float
    """Since when nothing had gone on then."""
    words: str
    """The chain, as "step 41 waits for 3 groups <- 2 in reward, oldest 94 s: judge"."""


def read_stalls(path: Path) -> tuple[Stall, ...]:
    """All stalls, oldest first; none where there is no file. A last line that is being written is left out.

    Raises `StorageError` for a file or a line that can't be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}.", next_step="Check the mount and the file's rights.") from error
    stalls = []
    for number, line in enumerate(lines, start=1):
        try:
            stalls.append(msgspec.json.decode(line, type=Stall))
        except msgspec.MsgspecError as error:
            raise StorageError(f"{path}:{number}: not a stall ({error}).", next_step="Remove the line.") from error
    return tuple(stalls)
