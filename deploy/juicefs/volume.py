"""One JuiceFS volume as a folder of this machine holds it: where each part lies, and what `up` was asked for."""

from __future__ import annotations

import json
import secrets
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from storage.files import make_folder, write_atomically

NAME = "vime"
"""Name of the volume, and of its bucket at the local gateway."""
LOOPBACK = "127.0.0.1"


class VolumeError(Exception):
    """The volume can't be brought up, inspected or taken down; the message says why and what to do."""


@dataclass
class Request:
    """What `up` was asked for; kept in `volume.json`, so that a later `up` or `down` needs only the folder."""

    mounts: list[str] = field(default_factory=list)
    bucket: str | None = None
    """URL of the object store's bucket; None for the gateway that `up` starts."""
    meta_url: str | None = None
    """URL of the metadata engine; None for the Redis that `up` starts."""
    redis_port: int = 0
    gateway_port: int = 0


@dataclass(frozen=True)
class Volume:
    """Paths and addresses of one volume."""

    folder: Path
    request: Request

    @classmethod
    def of(cls, folder: Path) -> Volume:
        """The volume in `folder`, as it was asked for before, if it was."""
        folder = folder.resolve()
        path = folder / "volume.json"
        return cls(folder, Request(**json.loads(path.read_bytes())) if path.exists() else Request())

    def save(self) -> None:
        """Remember the request."""
        make_folder(self.folder)
        write_atomically(self.folder / "volume.json", json.dumps(asdict(self.request), indent=1).encode())

    @property
    def mounts(self) -> list[Path]:
        return [Path(mount) for mount in self.request.mounts]

    @property
    def declaration(self) -> Path:
        return self.folder / "declaration.json"

    @property
    def redis(self) -> Path:
        return self.folder / "redis"

    @property
    def gateway(self) -> Path:
        return self.folder / "gateway"

    @property
    def has_own_redis(self) -> bool:
        return self.request.meta_url is None

    @property
    def has_own_gateway(self) -> bool:
        return self.request.bucket is None

    @property
    def meta_url(self) -> str:
        """URL of the metadata, without a password."""
        return self.request.meta_url or f"redis://{LOOPBACK}:{self.request.redis_port}/0"

    @property
    def bucket(self) -> str:
        return self.request.bucket or f"http://{LOOPBACK}:{self.request.gateway_port}/{NAME}"

    def log(self, part: str) -> Path:
        """Log of `redis`, `gateway`, or the mount of that number."""
        return self.folder / "logs" / f"{part}.log"

    def cache(self, mount: Path) -> Path:
        """Read cache of one mount."""
        return self.folder / "cache" / str(self.request.mounts.index(str(mount)))

    def secret(self, name: str) -> str:
        """A password of this volume, made once, readable by its owner alone."""
        path = self.folder / "secrets" / name
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, secrets.token_hex(16).encode())
            path.chmod(0o600)
        return path.read_text()

    def credentials(self) -> dict[str, str]:
        """Environment with which JuiceFS reaches the parts that `up` starts; those of others the user sets."""
        own = {}
        if self.has_own_redis:
            own["META_PASSWORD"] = self.secret("redis")
        if self.has_own_gateway:
            own |= {"ACCESS_KEY": NAME, "SECRET_KEY": self.secret("gateway")}
        return own


def choose_port(before: int) -> int:
    """The port of before when it is free, else one that the system chooses."""
    for port in (before, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            number: int = probe.getsockname()[1]
            return number
    raise VolumeError(f"No port of {LOOPBACK} can be bound. Bring up the loopback interface.")


def without_password(url: str) -> str:
    """For messages and the declaration."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host).geturl()
