"""What the machine itself says about a JuiceFS mount: the kernel's mount table, the client's own `.config`, `/proc`."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

FILE_SYSTEM = "fuse.juicefs"
OWNER_VARIABLE = "VIME_JUICEFS_FOLDER"
"""Environment variable that marks the processes of one folder."""


@dataclass(frozen=True)
class ClientConfig:
    """The options that a running client reports in `<mount>/.config`."""

    version: str
    writeback: bool
    open_cache: int
    """Nanoseconds; 0 means off."""
    readdir_cache: bool
    heartbeat_s: float
    trash_days: int
    storage: str
    pid: int


def mounted_type(mount: Path) -> str | None:
    """File system type of a mount point, None when nothing is mounted there. Never touches the mount itself."""
    found = None
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if _unescape(left.split()[4]) == str(mount):
            found = right.split()[0]  # the last one is on top
    return found


def read_client_config(mount: Path) -> ClientConfig:
    """Ask the client behind a mount how it was mounted.

    Raises:
        OSError: the client doesn't answer (it was killed, or nothing is mounted).
        KeyError, ValueError: the answer has another form (another JuiceFS version).
    """
    config = json.loads((mount / ".config").read_bytes())
    return ClientConfig(
        version=str(config["Version"]),
        writeback=bool(config["Chunk"]["Writeback"]),
        open_cache=int(config["Meta"]["OpenCache"]),
        readdir_cache=bool(config["ReaddirCache"]),
        heartbeat_s=int(config["Meta"]["Heartbeat"]) / 1e9,
        trash_days=int(config["Format"]["TrashDays"]),
        storage=str(config["Format"]["Storage"]),
        pid=int(config["Pid"]),
    )


def client_processes(folder: Path) -> list[int]:
    """Ids of the JuiceFS processes that `up` started for this folder, the supervisor and its child.

    They are known by a variable of their environment: the client overwrites its command line, and cuts it short.
    """
    mark = f"{OWNER_VARIABLE}={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:
            continue  # it has ended, or belongs to another user
    return sorted(found)


def processes_using(mount: Path) -> list[str]:
    """`<id> <name>` of processes that have a file open, or stand, below a mount point, as far as we may look."""
    inside = f"{mount}/"
    users = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            links = [folder / "cwd", *(folder / "fd").iterdir()]
            if any(f"{os.readlink(link)}/".startswith(inside) for link in links):
                users.append(f"{folder.name} {(folder / 'comm').read_text().strip()}")
        except OSError:
            continue  # it has ended, or belongs to another user
    return users


def _unescape(path: str) -> str:
    """The kernel writes blanks in paths as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), path)
