"""What two clients must see of each other: a good pair passes, and each fault of a client is found and named."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from storage import folder_client
from storage.folder_client import FolderClient
from storage.preflight import Probe
from storage.two_clients import probe_two_clients

NAMES = [
    "same folder", "growth", "zero tail", "fsync of an open file", "rename over a file", "lock", "exclusive create",
    "clock",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a faulty client never shows is not waited for."""
    monkeypatch.setattr(folder_client, "WAIT_S", 0.0)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[FolderClient]:
    client = FolderClient(tmp_path)
    yield client
    client.release()


def broken(here: FolderClient, there: FolderClient) -> dict[str, str]:
    probes = probe_two_clients(here, there)
    there.release()
    return {probe.name: probe.found for probe in probes if not probe.works}


def test_two_clients_of_a_good_file_system_pass(here: FolderClient, tmp_path: Path) -> None:
    there = FolderClient(tmp_path)
    assert probe_two_clients(here, there) == [Probe(name, True, "works") for name in NAMES]


def test_folder_of_another_file_system_is_the_only_finding(here: FolderClient, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    probes = probe_two_clients(here, FolderClient(tmp_path / "elsewhere"))
    assert [(probe.name, probe.works) for probe in probes] == [("same folder", False)]
    assert "is not seen by the other" in probes[0].found


class Hiding(FolderClient):
    """Never sees what was appended after it first read a file."""

    def read_once(self, name: str) -> bytes | None:
        content = super().read_once(name)
        if content is not None:
            self.first = getattr(self, "first", {})
            return content[: self.first.setdefault(name, len(content))]
        return None


class Zeroing(FolderClient):
    """Sees the length of a file before its last bytes."""

    def read_once(self, name: str) -> bytes | None:
        content = super().read_once(name)
        return content[:-1] + b"\0" if content is not None and name.startswith("tail") else content


class Hoarding(FolderClient):
    """Makes data durable on closing only."""

    def append(self, name: str, data: bytes, *, sync: bool) -> None:
        if name.startswith("synced"):
            super().append(name, b"", sync=sync)
        else:
            super().append(name, data, sync=sync)


class Forgetful(FolderClient):
    """Loses sight of a file that somebody replaces."""

    def read_once(self, name: str) -> bytes | None:
        content = super().read_once(name)
        self.seen = getattr(self, "seen", {})
        vanished = (
            name.startswith("replaced") and content is not None and self.seen.setdefault(name, content) != content
        )
        return None if vanished else content


class Stuck(FolderClient):
    """Keeps showing the file that was replaced."""

    def read_once(self, name: str) -> bytes | None:
        content = super().read_once(name)
        if content is None or not name.startswith("replaced"):
            return content
        self.seen = getattr(self, "seen", {})
        return self.seen.setdefault(name, content)


class Torn(FolderClient):
    """Shows half of the file that was replaced and half of the new one."""

    def read_once(self, name: str) -> bytes | None:
        content = super().read_once(name)
        if content is None or not name.startswith("replaced"):
            return content
        self.seen = getattr(self, "seen", {})
        return self.seen.setdefault(name, content)[:1500] + content[1500:]


class LocalLock(FolderClient):
    """Locks among its own processes only."""

    def is_locked(self, name: str, *, keep: bool = False) -> bool:
        return super().is_locked(f"own-{name}", keep=keep)

    def unlock(self, name: str) -> None:
        super().unlock(f"own-{name}")


class LeakyLock(FolderClient):
    """Never lets go of a lock."""

    def unlock(self, name: str) -> None:
        """Keep it."""


class NoLock(FolderClient):
    """Its lock service is gone."""

    def is_locked(self, name: str, *, keep: bool = False) -> bool:  # noqa: ARG002
        raise OSError(errno.ENOLCK, "No locks available")


class StaleHandle(FolderClient):
    """Its server has forgotten the file."""

    def is_locked(self, name: str, *, keep: bool = False) -> bool:  # noqa: ARG002
        raise OSError(errno.ESTALE, "Stale file handle")


class Overwriting(FolderClient):
    """Makes a file that is there once more."""

    def create_exclusively(self, name: str) -> bool:
        super().create_exclusively(name)
        return True


@dataclass
class Late(FolderClient):
    """Its clock is an hour behind."""

    behind_s: float = field(default=3600.0)

    def clock(self) -> float:
        return super().clock() - self.behind_s


@pytest.mark.parametrize(
    ("client", "probe", "found"),
    [
        (Hiding, "growth", "after 100 bytes were appended and synced, the other client sees 1 of 101 bytes for"),
        (Zeroing, "zero tail", "1 zero bytes at the end of 1"),
        (Hoarding, "fsync of an open file", "8192 synced bytes of an open file: the other client sees 0 of 8192"),
        (Forgetful, "rename over a file", "a file that was replaced is missing for the other client"),
        (Stuck, "rename over a file", "the other client sees the replaced file for more than"),
        (Torn, "rename over a file", "neither the old nor the new one"),
        (LocalLock, "lock", "both clients got the same lock"),
        (LeakyLock, "lock", "a released lock is not free for the other client"),
        (NoLock, "lock", "No locks available"),
        (StaleHandle, "lock", "Stale file handle"),
        (Overwriting, "exclusive create", "both clients made the same file exclusively"),
        (Late, "clock", "the clocks differ by 3600.0 s, allowed: 2 s"),
    ],
)
@pytest.mark.parametrize("faulty_is_here", [False, True], ids=["there", "here"])
def test_fault_of_one_client_is_found_and_named(
    tmp_path: Path, client: Callable[[Path], FolderClient], probe: str, found: str, faulty_is_here: bool
) -> None:
    faulty, sound = client(tmp_path), FolderClient(tmp_path)
    faults = broken(faulty, sound) if faulty_is_here else broken(sound, faulty)
    faulty.release()
    sound.release()
    assert found in faults[probe]
    if client is not Hiding:  # it hides what other probes write, too
        assert list(faults) == [probe]


def test_what_becomes_visible_in_time_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FolderClient):
        """Shows what was there three reads ago."""

        def read_once(self, name: str) -> bytes | None:
            self.past = getattr(self, "past", {})
            past = self.past.setdefault(name, [None, None, None])
            past.append(super().read_once(name))
            return past[-4]

    monkeypatch.setattr(folder_client, "WAIT_S", 5.0)
    monkeypatch.setattr(folder_client, "_POLL_S", 0.0)
    assert broken(FolderClient(tmp_path), Slow(tmp_path)) == {}
