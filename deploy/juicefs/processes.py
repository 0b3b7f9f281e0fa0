"""Processes of one volume: they carry its folder in their environment, and are recorded in it, so that no others are
ever ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from deploy.juicefs.volume import VolumeError
from storage.files import write_atomically

FOLDER_VARIABLE = "VIME_JUICEFS_FOLDER"
PART_VARIABLE = "VIME_JUICEFS_PART"
RECORD = "processes.json"
TIMEOUT_S = 60.0
_POLL_S = 0.05


def own_environment(folder: Path, part: str, more: Mapping[str, str]) -> dict[str, str]:
    """Environment of a process of this volume; `part` is `redis`, `gateway`, or a mount point."""
    return {**os.environ, **more, FOLDER_VARIABLE: str(folder), PART_VARIABLE: part}


def own_processes(folder: Path, part: str | None = None) -> list[int]:
    """Ids of the processes of this volume, or of one part of it.

    Their command lines don't tell: a JuiceFS client overwrites its own, and cuts it short. Some overwrite even their
    environment after a while; those are known by id and start time, which `remember` has recorded.
    """
    marks = {f"{FOLDER_VARIABLE}={folder}".encode()}
    if part is not None:
        marks.add(f"{PART_VARIABLE}={part}".encode())
    recorded = [one for name, ones in _recorded(folder).items() if part in (None, name) for one in ones]
    found = {pid for pid, started in recorded if _start_time(pid) == started}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marks <= set((process / "environ").read_bytes().split(b"\0")):
                found.add(int(process.name))
        except OSError:
            continue  # it has ended, or belongs to another user
    return sorted(found - {os.getpid()})


def remember(folder: Path, part: str) -> None:
    """Record the processes of one part, which have just been started."""
    record = _recorded(folder)
    record[part] = [(pid, started) for pid in own_processes(folder, part) if (started := _start_time(pid)) is not None]
    write_atomically(folder / RECORD, json.dumps(record).encode())


def _recorded(folder: Path) -> dict[str, list[tuple[int, int]]]:
    path = folder / RECORD
    content = json.loads(path.read_bytes()) if path.exists() else {}
    return {part: [(pid, started) for pid, started in ones] for part, ones in content.items()}


def _start_time(pid: int) -> int | None:
    """Clock ticks from the machine's start to that of the process; None when it doesn't run."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(fields[18])


def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a server that outlives this program."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip


def wait_ready(process: subprocess.Popen[bytes], name: str, ready: Callable[[], bool], log: Path) -> None:
    """Wait until a server answers. Raises `VolumeError` with its last log lines when it ends or takes too long."""
    deadline = time.monotonic() + TIMEOUT_S
    while not ready():
        if process.poll() is not None:
            raise VolumeError(f"{name} ended with status {process.returncode}.{last_lines(log)}")
        if time.monotonic() > deadline:
            raise VolumeError(f"{name} does not answer after {TIMEOUT_S:.0f} s.{last_lines(log)}")
        time.sleep(_POLL_S)


def run(command: Sequence[str], environment: Mapping[str, str], log: Path | None = None) -> str:
    """Run to the end; what it printed. Raises `VolumeError` with its last lines when it fails."""
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise VolumeError(
            f"`{' '.join(command[:2])}` did not end within {TIMEOUT_S:.0f} s.{last_lines(log)}"
        ) from error
    if done.returncode != 0:
        output = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise VolumeError(
            f"`{Path(command[0]).name} {command[1]}` ended with status {done.returncode}:\n{output}{last_lines(log)}"
        )
    return done.stdout


def end(folder: Path, part: str, *, grace_s: float = 10.0) -> None:
    """End the processes of one part with SIGTERM, and after `grace_s` with SIGKILL.

    Raises:
        VolumeError: some did not end.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in own_processes(folder, part):
            _signal(pid, number)
        if wait_gone(folder, part, grace_s):
            return
    raise VolumeError(f"Processes {own_processes(folder, part)} of {part} did not end. End them yourself.")


def wait_gone(folder: Path, part: str, timeout_s: float) -> bool:
    """Whether the processes of one part ended in time."""
    deadline = time.monotonic() + timeout_s
    while own_processes(folder, part):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def users_of(mount: Path) -> list[str]:
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


def last_lines(log: Path | None) -> str:
    """The end of a log, for a message."""
    if log is None or not log.exists():
        return ""
    return "\n".join([f"\nLast lines of {log}:", *log.read_text(errors="replace").splitlines()[-5:]])


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
