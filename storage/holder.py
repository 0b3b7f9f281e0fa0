"""Who coordinates a queue, as the disk tells it; nothing is locked."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import psutil

from storage.lock import Holder


class CoordinatorView(msgspec.Struct, frozen=True):
    """The newest holder of the coordinator lock."""

    epoch: int
    owner: str
    pid: int
    host: str
    since: float
    """Unix seconds."""
    alive: bool | None
    """None where it can't be known: the holder is of another host."""


def read_coordinator(control_dir: Path) -> CoordinatorView | None:
    """The newest holder, None when there never was one or its file is just being replaced."""
    numbers = [int(path.stem) for path in (control_dir / "epochs").glob("*.json") if path.stem.isdigit()]
    for epoch in sorted(numbers, reverse=True):
        try:
            holder = msgspec.json.decode((control_dir / "epochs" / f"{epoch:08d}.json").read_bytes(), type=Holder)
        except (OSError, msgspec.MsgspecError):
            continue
        alive = process_lives(holder.pid, since=holder.since) if holder.host == socket.gethostname() else None
        return CoordinatorView(epoch, holder.owner, holder.pid, holder.host, holder.since, alive)
    return None


def process_lives(pid: int, *, since: float) -> bool:
    """Whether a process of this host that was there at `since` (Unix seconds) still is; its number may be another's."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= since + 1.0
    except psutil.Error:
        return False
