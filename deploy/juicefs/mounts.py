"""Format, mount and unmount a volume with the options that the queue needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from deploy.juicefs.processes import (
    end,
    last_lines,
    own_environment,
    own_processes,
    remember,
    run,
    users_of,
    wait_gone,
)
from deploy.juicefs.services import ask_redis
from deploy.juicefs.volume import NAME, Volume, VolumeError, without_password
from storage.juicefs import FILE_SYSTEM, ClientOptions, declaration_of, read_options, unsafe_options
from storage.mounts import MOUNT_TABLE, mounted_at

HEARTBEAT = "2s"
"""A dead client's file locks are freed after about five heartbeats."""
TRASH_DAYS = "1"
"""Without a trash, readers on another client see a replaced file vanish."""
CACHE_SIZE = "2G"
TIMEOUT_S = 60.0
UNMOUNT_S = 10.0
"""For a client to end by itself once it is unmounted."""
UNFORMATTED = "is not formatted"


def format_command(volume: Volume, juicefs: Path) -> list[str]:
    return [
        str(juicefs), "format", "--storage", "s3", "--bucket", volume.bucket, "--trash-days", TRASH_DAYS,
        volume.meta_url, NAME,
    ]  # fmt: skip


def mount_command(volume: Volume, juicefs: Path, mount: Path) -> list[str]:
    """`juicefs mount`; --writeback, --readdir-cache and -o writeback_cache are off unless given."""
    return [
        str(juicefs), "mount", "--background", "--check-storage", "--no-usage-report", "--no-syslog",
        "--heartbeat", HEARTBEAT, "--open-cache", "0", "--backup-meta", "0", "--metrics", "127.0.0.1:0",
        "--bucket", volume.bucket, "--cache-dir", str(volume.cache(mount)), "--cache-size", CACHE_SIZE,
        "--log", str(volume.log(_log_name(volume, mount))), volume.meta_url, str(mount),
    ]  # fmt: skip


def make_volume(volume: Volume, juicefs: Path) -> None:
    """Format the volume, unless its metadata engine holds one already."""
    environment = own_environment(volume.folder, "format", volume.credentials())
    try:
        run([str(juicefs), "config", volume.meta_url], environment)
    except VolumeError as error:
        if UNFORMATTED not in str(error):
            raise
        run(format_command(volume, juicefs), environment)


def mount_volume(volume: Volume, juicefs: Path, mount: Path) -> None:
    """Mount, unless it is mounted and its client answers. A dead mount is removed first."""
    if is_alive(volume, mount):
        return
    unmount(volume, juicefs, mount)
    mount.mkdir(parents=True, exist_ok=True)
    if any(mount.iterdir()):
        raise VolumeError(f"{mount} is not empty, and a mount would hide what is in it. Move that away.")
    log = volume.log(_log_name(volume, mount))
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = own_environment(volume.folder, str(mount), volume.credentials())
    run(mount_command(volume, juicefs, mount), environment, log)
    _wait_mounted(mount, log)
    remember(volume.folder, str(mount))


def is_alive(volume: Volume, mount: Path) -> bool:
    """Whether this volume's client answers at `mount`. Raises `VolumeError` when something else is mounted there."""
    present = _mounted_at(mount)
    if present is None:
        return False
    if not _is_ours(volume, mount, present):
        raise VolumeError(f"{mount}: {present} is mounted there by somebody else. Unmount it, or choose another.")
    return _answers(mount)


def _is_ours(volume: Volume, mount: Path, present: str) -> bool:
    """Whether what is mounted belongs to this volume, or to nobody any more."""
    return present == FILE_SYSTEM and (bool(own_processes(volume.folder, str(mount))) or not _answers(mount))


def _answers(mount: Path) -> bool:
    """Whether a JuiceFS client serves the mount; a killed one leaves a mount that answers nothing."""
    try:
        read_options(mount)
    except (OSError, KeyError, TypeError, ValueError):
        return False
    return True


def checked_options(mount: Path) -> ClientOptions:
    """What the client says, after a file was written, synced and read back.

    Raises:
        VolumeError: it is mounted with options that lose or hide data, or the file came back differently.
    """
    options = read_options(mount)
    wrong = unsafe_options(options)
    if wrong:
        raise VolumeError(f"{mount} can't hold the queue: {'; '.join(wrong)}. Run down.sh, then up.sh.")
    with tempfile.NamedTemporaryFile(dir=mount, prefix=".probe-") as probe:
        content = os.urandom(4096)
        probe.write(content)
        probe.flush()
        os.fsync(probe.fileno())
        if Path(probe.name).read_bytes() != content:
            raise VolumeError(f"{mount}: a file that was written and synced reads back differently. See the logs.")
    return options


def declare(volume: Volume) -> dict[str, object]:
    """The declaration of the volume from what all of its clients say. Raises `VolumeError` when they differ."""
    found = {mount: checked_options(mount) for mount in volume.mounts}
    declarations = {mount: declaration_of(options, durability(volume, options)) for mount, options in found.items()}
    first = declarations[volume.mounts[0]]
    differing = [str(mount) for mount, declaration in declarations.items() if declaration != first]
    if differing:
        raise VolumeError(
            f"{', '.join(differing)} is mounted otherwise than {volume.mounts[0]}. Run down.sh, then up.sh."
        )
    return first


def durability(volume: Volume, options: ClientOptions) -> str:
    """Where data and metadata are kept, and what their servers say of syncing."""
    objects = f"objects: {options.object_storage} at {options.bucket}"
    if volume.has_own_gateway:
        objects += " (a gateway on this machine that does not sync: not safe against power loss)"
    return f"{objects}; metadata: {without_password(volume.meta_url)} ({metadata_syncs(volume)})"


def metadata_syncs(volume: Volume) -> str:
    """What Redis says of `appendfsync`."""
    password = volume.credentials().get("META_PASSWORD") or os.environ.get("META_PASSWORD", "")
    if not volume.meta_url.startswith("redis://"):
        return "syncing not known"
    try:
        reply = ask_redis(volume.meta_url, password, "CONFIG", "GET", "appendfsync").split("\r\n")
    except OSError:
        return "syncing not known"
    return f"appendfsync {reply[-2]}" if "appendfsync" in reply else "syncing not known"


def unmount(volume: Volume, juicefs: Path, mount: Path) -> None:
    """Unmount, and end what is left of this volume's client there. What is not mounted, or is somebody else's, stays.

    Raises:
        VolumeError: it is in use, naming by whom.
    """
    present = _mounted_at(mount)
    if present is not None and _is_ours(volume, mount, present):
        dead = not _answers(mount)
        command = _lazily(mount) if dead else [str(juicefs), "umount", str(mount)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if _mounted_at(mount) is not None:
            users = "" if dead else ", ".join(users_of(mount))
            raise VolumeError(
                f"{mount} can't be unmounted: {(done.stdout + done.stderr).strip()} In use by: {users or 'unknown'}. "
                "Stop these processes, then run this again."
            )
        wait_gone(volume.folder, str(mount), UNMOUNT_S)
    end(volume.folder, str(mount))


def _lazily(mount: Path) -> list[str]:
    helper = shutil.which("fusermount3")
    return [helper, "-u", "-z", str(mount)] if helper and os.getuid() != 0 else ["umount", "-l", str(mount)]


def _wait_mounted(mount: Path, log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while _mounted_at(mount) != FILE_SYSTEM:
        if time.monotonic() > deadline:
            raise VolumeError(f"{mount} was not mounted within {TIMEOUT_S:.0f} s.{last_lines(log)}")
        time.sleep(0.05)


def _mounted_at(mount: Path) -> str | None:
    return mounted_at(mount, MOUNT_TABLE.read_text())


def _log_name(volume: Volume, mount: Path) -> str:
    return f"mount-{volume.request.mounts.index(str(mount))}"
