"""Whether two clients of one shared folder see each other as the queue needs it: tried, not believed."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from functools import partial

from storage.folder_client import WAIT_S, FileClient
from storage.preflight import Probe, tried

APPENDED_BYTES = (1, 100, 4097, 70_000, 1_000_000)
"""Sizes that straddle pages, write buffers and blocks of file systems."""
REPLACEMENTS = 2
MAX_CLOCK_DIFFERENCE_S = 2.0
_Attempt = Callable[[FileClient, FileClient], str | None]


def probe_two_clients(here: FileClient, there: FileClient) -> list[Probe]:
    """What `here` and `there`, two clients in one folder that nobody else uses, see of each other.

    Each probe is tried in both directions. When one of them can't see the other's files at all, that is the only
    result.
    """
    shared = tried("same folder", partial(_both, _same_folder, here, there))
    if not shared.works:
        return [shared]
    attempts: dict[str, _Attempt] = {
        "growth": _growth,
        "zero tail": _zero_tail,
        "fsync of an open file": _fsync,
        "rename over a file": _rename,
        "lock": _lock,
        "exclusive create": _exclusive,
        "clock": _clock,
    }
    return [shared, *(tried(name, partial(_both, attempt, here, there)) for name, attempt in attempts.items())]


def _both(attempt: _Attempt, here: FileClient, there: FileClient) -> str | None:
    fault = attempt(here, there)
    if fault is not None:
        return fault
    fault = attempt(there, here)
    return None if fault is None else f"in the other direction: {fault}"


def _same_folder(writer: FileClient, reader: FileClient) -> str | None:
    name, token = _fresh("token"), _content(16)
    reader.read_once(name)  # a client that remembers that there is no such file must ask again
    writer.append(name, token, sync=True)
    writer.close(name)
    if reader.read(name, token) != token:
        return f"a file that one client made is not seen by the other within {WAIT_S:g} s"
    return None


def _growth(writer: FileClient, reader: FileClient) -> str | None:
    """A file that is appended to, closed and appended to again is seen whole after each fsync."""
    name, written = _fresh("growing"), b""
    for number, size in enumerate(APPENDED_BYTES):
        written += _content(size)
        writer.append(name, written[-size:], sync=True)
        if number % 2:
            writer.close(name)
        seen = reader.read(name, written)
        if seen != written:
            return (
                f"after {size} bytes were appended and synced, the other client sees {_compare(seen, written)} for "
                f"{WAIT_S:g} s"
            )
    writer.close(name)
    return None


def _zero_tail(writer: FileClient, reader: FileClient) -> str | None:
    """Of a file that is being written, another client sees a beginning, never zeros where data belongs."""
    name, written = _fresh("tail"), b""
    for size in APPENDED_BYTES:
        written += _content(size)
        writer.append(name, written[-size:], sync=False)
        seen = reader.read_once(name)
        if seen is not None and not written.startswith(seen):
            return f"while {size} bytes were appended, the other client saw {_compare(seen, written)}"
        writer.append(name, b"", sync=True)
        seen = reader.read(name, written)
        if seen is not None and not written.startswith(seen):
            return f"after {size} bytes were appended and synced, the other client saw {_compare(seen, written)}"
    writer.close(name)
    return None


def _fsync(writer: FileClient, reader: FileClient) -> str | None:
    """What is synced is there for others while the writer still has the file open."""
    name, content = _fresh("synced"), _content(8192)
    writer.append(name, content, sync=True)
    seen = reader.read(name, content)
    writer.close(name)
    if seen != content:
        return f"{len(content)} synced bytes of an open file: the other client sees {_compare(seen, content)}"
    return None


def _rename(writer: FileClient, reader: FileClient) -> str | None:
    """A replaced file is the old one or the new one for others, whole, and soon the new one."""
    name = _fresh("replaced")
    old = _content(3000)
    writer.replace(name, old)
    if reader.read(name, old) != old:
        return "a renamed file does not appear at the other client"
    for _ in range(REPLACEMENTS):
        new = _content(3000)
        writer.replace(name, new)
        seen = reader.read_once(name)
        if seen is None:
            return "a file that was replaced is missing for the other client (trash-days 0?)"
        if seen not in (old, new):
            return "a file that was replaced is neither the old nor the new one for the other client"
        if reader.read(name, new) != new:
            return f"the other client sees the replaced file for more than {WAIT_S:g} s"
        old = new
    return None


def _lock(holder: FileClient, other: FileClient) -> str | None:
    name = _fresh("lock")
    if not holder.try_lock(name):
        return "a new file's lock can't be taken"
    try:
        if not other.is_locked(name):
            return "both clients got the same lock"
    finally:
        holder.unlock(name)
    if not other.try_lock(name):
        return f"a released lock is not free for the other client within {WAIT_S:g} s"
    other.unlock(name)
    return None


def _exclusive(first: FileClient, second: FileClient) -> str | None:
    name = _fresh("once")
    second.read_once(name)
    if not first.create_exclusively(name):
        return "a new file can't be made exclusively"
    return "both clients made the same file exclusively" if second.create_exclusively(name) else None


def _clock(here: FileClient, there: FileClient) -> str | None:
    before = here.clock()
    other = there.clock()
    after = here.clock()
    difference = max(before - other, other - after, 0.0)
    if difference > MAX_CLOCK_DIFFERENCE_S:
        return f"the clocks differ by {difference:.1f} s, allowed: {MAX_CLOCK_DIFFERENCE_S:g} s"
    return None


def _fresh(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def _content(num_bytes: int) -> bytes:
    """Random bytes without a zero, so that a zero is always a fault."""
    return random.randbytes(num_bytes).replace(b"\0", b"\1")


def _compare(seen: bytes | None, written: bytes) -> str:
    if seen is None:
        return "no file"
    zeros = len(seen) - len(seen.rstrip(b"\0"))
    if zeros:
        return f"{zeros} zero bytes at the end of {len(seen)}"
    if 0 in seen:
        return f"zero bytes in the middle of {len(seen)}"
    if not written.startswith(seen):
        return f"{len(seen)} other bytes"
    return f"{len(seen)} of {len(written)} bytes"
