"""A JuiceFS volume of its own for a test session: Redis, an S3 endpoint, and two clients that can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.juicefs.mounts import mount_command
from deploy.juicefs.packages import find_juicefs, require_fuse, require_packages
from deploy.juicefs.processes import own_environment, own_processes, run
from deploy.juicefs.volume import Volume, VolumeError
from tests.support.shared_mount import DECLARATION, MOUNT, PEER

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "deploy" / "juicefs"


def why_impossible(folder: Path) -> str:
    """Why this machine can't bring up a volume; empty when it can."""
    try:
        require_fuse()
        require_packages(Volume.of(folder))
        find_juicefs()
    except VolumeError as error:
        return str(error)
    return ""


def call(script: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `up.sh` or `down.sh`."""
    environment = {**os.environ, "VIME_PYTHON": sys.executable}
    command = [str(SCRIPTS / script), *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)


@dataclass(frozen=True)
class TwoMounts:
    """The volume; `here` and `there` are its two mounts."""

    folder: Path

    @property
    def here(self) -> Path:
        return self.folder / "here"

    @property
    def there(self) -> Path:
        return self.folder / "there"

    @property
    def declaration_path(self) -> Path:
        return self.folder / "declaration.json"

    @property
    def declaration(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.declaration_path.read_text())
        return content

    def new_folder(self) -> Path:
        """An empty folder on the volume, as `here` names it; seen from `there` when this returns."""
        folder = self.here / uuid.uuid4().hex[:8]
        folder.mkdir()
        assert self.at_peer(folder).is_dir()
        return folder

    def at_peer(self, path: Path) -> Path:
        return self.there / path.relative_to(self.here)

    def up(self) -> None:
        """Bring up what is not up."""
        done = call("up.sh", self.folder, "--mount", self.here, "--mount", self.there)
        assert done.returncode == 0, done.stderr

    def down(self, *words: str) -> None:
        done = call("down.sh", self.folder, *words)
        assert done.returncode == 0, done.stderr

    def kill_client(self, mount: Path) -> None:
        """SIGKILL a client and its supervisor, as when its host dies."""
        for pid in own_processes(self.folder, str(mount)):
            os.kill(pid, signal.SIGKILL)

    def environment(self) -> dict[str, str]:
        """For tests and programs that put their pools on `here` and publish payloads from `there`."""
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            DECLARATION: str(self.declaration_path),
            MOUNT: str(self.here),
            PEER: str(self.there),
        }

    @contextmanager
    def third_mount(self, *options: str) -> Iterator[Path]:
        """Another client, mounted with more options than `up.sh` gives."""
        volume = Volume.of(self.folder)
        mount = self.folder / "third"
        mount.mkdir(exist_ok=True)
        volume.request.mounts.append(str(mount))  # not saved: `up.sh` must not know it
        juicefs = find_juicefs()
        command = mount_command(volume, juicefs, mount)
        environment = own_environment(volume.folder, str(mount), volume.credentials())
        run([*command[:-2], *options, *command[-2:]], environment)
        try:
            yield mount
        finally:
            run([str(juicefs), "umount", "--force", str(mount)], environment)
