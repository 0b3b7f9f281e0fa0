"""A folder for the queue: what its file system does here, and what another client of it sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.doctor.check import Check, Outcome, failed, passed
from pipeline.doctor.juicefs import juicefs_mount
from storage.folder_client import FileClient, FolderClient
from storage.juicefs import FILE_SYSTEM, ClientOptions, read_options
from storage.mounts import MOUNT_TABLE, Mount, mount_of
from storage.preflight import Probe, probe_folder, probe_place, probe_space
from storage.two_clients import probe_two_clients
from vime.errors import StorageError
from vime.folders import existing_parent

OpenPeer = Callable[[Path], "FileClient"]


def storage_checks(folder: Path, declaration: Mapping[str, Any] | None, table: str | None = None) -> list[Check]:
    """The folder (or its nearest ancestor that exists) as this host has it.

    A JuiceFS mount is checked for its options; with a declaration it must be one, and be as declared.
    """
    try:
        place = existing_parent(folder)
    except OSError as error:
        return [failed("storage", f"{folder}: {error.strerror}.", "Its client is dead: unmount it and mount it anew.")]
    mount = _mount(place, table)
    checks = [probes_check("storage", place, [*probe_folder(place), probe_space(place)])]
    if declaration is not None or (mount is not None and mount.file_system == FILE_SYSTEM):
        checks = [*juicefs_mount(place, declaration, table), *checks]
    return checks


def folder_checks(folder: Path, declaration: Mapping[str, Any] | None, table: str | None = None) -> list[Check]:
    """`storage_checks` of a folder that must exist: a mount that is missing has an ancestor that works."""
    try:
        there = folder.is_dir()
    except OSError:
        there = True  # a dead client, which storage_checks tells
    if there:
        return storage_checks(folder, declaration, table)
    if folder.exists():
        return [failed("storage", f"{folder} is a file, not a folder.", "Name a folder.")]
    parent = existing_parent(folder)
    return [
        failed(
            "storage",
            f"{folder} does not exist (its nearest ancestor that does is {parent}).",
            "Mount it, or make it with `mkdir -p`, then check again.",
        )
    ]


def mount_peer_checks(folder: Path, peer: Path, table: str | None = None) -> list[Check]:
    """`folder` against another mount of the same file system on this host, given by its mount point or as the same
    folder in it.
    """
    name, place = "other client", existing_parent(folder)
    here, there = _mount(place, table), _mount(peer, table)
    if here is None or there is None or here.point == there.point:
        found = f"{peer} is on the same mount as {place}" if here is not None else f"{place} is on no mount"
        return [failed(name, f"{found}.", "Name another mount of the same file system, or a host of the Ray cluster.")]
    if here.file_system == there.file_system == FILE_SYSTEM:
        wrong = _not_two_clients(read_options(here.point), read_options(there.point))
        checks = [failed(name, f"{peer}: {wrong}.", "Name a second mount of the same volume.")] if wrong else []
        checks += [check for check in juicefs_mount(peer, None, table) if check.outcome is Outcome.FAIL]
        if checks:
            return checks
    at_peer = peer / place.resolve().relative_to(here.point) if peer.resolve() == there.point else peer
    return [two_clients_check(place, str(peer), lambda made: FolderClient(at_peer / made.name))]


def two_clients_check(folder: Path, peer: str, open_peer: OpenPeer) -> Check:
    """Try `folder` from here and through `open_peer(probe folder)`, which is the other client's view of it."""
    with probe_place(folder) as made, _own_view(made) as here:
        return probes_check(f"two clients ({peer})", folder, probe_two_clients(here, open_peer(made)))


def probes_check(name: str, folder: Path, probes: Sequence[Probe]) -> Check:
    """One check of what was tried."""
    broken = [f"{probe.name}: {probe.found}" for probe in probes if not probe.works]
    if broken:
        return failed(
            name, f"{folder}: {'; '.join(broken)}.", "Mount it with other options, or use another file system."
        )
    return passed(name, f"{folder}: {', '.join(probe.name for probe in probes)} work")


def refuse_failed(checks: Sequence[Check], folder: Path) -> None:
    """Raise `StorageError` with the reasons of the checks that failed."""
    bad = [check for check in checks if check.outcome is Outcome.FAIL]
    if bad:
        raise StorageError(
            f"The queue can't lie in {folder}. " + " ".join(f"{check.name}: {check.found}" for check in bad),
            next_step=f"{bad[0].next_step} `vime doctor --storage {folder}` checks again.",
        )


@contextmanager
def _own_view(place: Path) -> Iterator[FolderClient]:
    client = FolderClient(place)
    try:
        yield client
    finally:
        client.release()


def _not_two_clients(here: ClientOptions, there: ClientOptions) -> str | None:
    if here.volume_id != there.volume_id:
        return f"it is another volume ({there.volume_id}, not {here.volume_id})"
    if here.session == there.session:
        return f"it is the same client (session {here.session})"
    return None


def _mount(path: Path, table: str | None) -> Mount | None:
    return mount_of(path.resolve(), MOUNT_TABLE.read_text() if table is None else table)
