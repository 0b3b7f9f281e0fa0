"""Checked reads of a pack file that another process, perhaps on another host, has written.

On a shared file system the end of a file that grows can be missing or read as zeros for a while. Such bytes don't
match their digests; they are read again a few times, and refused at last.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import sleep
from types import TracebackType

from storage.chunk_layout import Run
from storage.chunks import ColumnDigests, digest_of
from vime.errors import CorruptDataError

WAITS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
"""Pauses before bytes that don't match are read again; together longer than the attribute caches of a mount last."""


class PackFile:
    """An open pack, for the time of one read: a file that is opened anew shows what was written since."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY)

    def read(self, run: Run, target: memoryview, *, start: int, digests: ColumnDigests) -> None:
        """Fill `target` with the bytes of `run`, whose column begins at byte `start`; all of them match `digests`.

        Raises `CorruptDataError` when they still don't after all waits, and `OSError`.
        """
        for wait_s in (*WAITS_S, None):
            found = self._fill(target, start + run.offset)
            bad = digests.first_bad_chunk(run, target) if found == len(target) else None
            if found == len(target) and bad is None:
                return
            if wait_s is None:
                raise self._damage(run, target, found, bad, start, digests)
            sleep(wait_s)
            self._open_again()

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> PackFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fill(self, target: memoryview, offset: int) -> int:
        """Bytes that were there."""
        filled = 0
        while filled < len(target):
            count = os.preadv(self._descriptor, [target[filled:]], offset + filled)
            if count == 0:
                break
            filled += count
        return filled

    def _open_again(self) -> None:
        """Drop what the kernel keeps of the file, and see its present size."""
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        descriptor = os.open(self._path, os.O_RDONLY)
        os.close(self._descriptor)
        self._descriptor = descriptor

    def _damage(
        self, run: Run, content: memoryview, found: int, bad: int | None, start: int, digests: ColumnDigests
    ) -> CorruptDataError:
        where = f"{self._path}, bytes {start + run.offset} to {start + run.offset + run.num_bytes}"
        tries = f"after {len(WAITS_S) + 1} reads in {sum(WAITS_S):g} s"
        if bad is None:
            return CorruptDataError(
                f"{where}: only {found} of {run.num_bytes} bytes are there {tries}.",
                next_step="Check that the mount shows what other hosts wrote (vime doctor --storage).",
            )
        chunk = dict(run.chunks(content))[bad]
        what = "are zeros" if not any(chunk) else "don't match their digest"
        return CorruptDataError(
            f"{where}: the {len(chunk)} bytes of chunk {bad} {what} {tries}; "
            f"expected XXH3 {digests.digest(bad).hex()}, found {digest_of(chunk).hex()}.",
            next_step="Restore the file from a copy, or drop the group.",
        )
