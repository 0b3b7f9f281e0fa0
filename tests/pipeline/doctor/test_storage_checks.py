"""Checks of a folder for the queue: the mount's options, its declaration, another client, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline import storage_proof
from pipeline.doctor.check import Outcome
from pipeline.doctor.juicefs import juicefs_mount
from pipeline.doctor.storage import mount_peer_checks, storage_checks, two_clients_check
from pipeline.storage_proof import prove_here
from storage import folder_client
from storage.folder_client import FolderClient
from storage.juicefs import ClientOptions, declaration_of
from tests.pipeline.preview.planned import settings_of
from tests.storage.test_juicefs import SAFE
from vime.errors import StorageError
from vime.settings.groups.queue import QueueSettings

DECLARED = declaration_of(SAFE, "test")


def table(folder: Path, kind: str = "fuse.juicefs") -> str:
    return f"1 0 8:1 / / rw - ext4 d rw\n2 1 0:5 / {folder} rw - {kind} JuiceFS:vime rw\n"


def test_juicefs_mount_as_declared_passes(tmp_path: Path) -> None:
    (check,) = juicefs_mount(tmp_path, DECLARED, table(tmp_path), lambda _: SAFE)
    assert check.outcome is Outcome.PASS
    assert "mounted as declared (1.4.2, s3)" in check.found


def test_juicefs_mount_without_a_declaration_is_judged_by_its_options(tmp_path: Path) -> None:
    (sound,) = juicefs_mount(tmp_path, None, table(tmp_path), lambda _: SAFE)
    (unsafe,) = juicefs_mount(tmp_path, None, table(tmp_path), lambda _: replace(SAFE, writeback=True))
    assert (sound.outcome, unsafe.outcome) == (Outcome.PASS, Outcome.FAIL)


@pytest.mark.parametrize(
    ("declared", "kind", "options", "outcome", "found", "next_step"),
    [
        ({}, "ext4", {}, "fail", "lies on ext4", "local profile"),
        ({"writeback": True}, "fuse.juicefs", {"writeback": True}, "fail", "writeback True, allowed: False", "anew"),
        ({}, "fuse.juicefs", {"open_cache_s": 5.0}, "fail", "open_cache is declared 0, the client says 5", "anew"),
        ({}, "fuse.juicefs", {"kernel_writeback": True}, "fail", "-o writeback_cache", "anew"),
        ({"client_version": "1"}, "fuse.juicefs", {}, "fail", "client_version is declared '1'", "anew"),
        ({}, "fuse.juicefs", {"heartbeat_s": 12.0}, "warn", "--heartbeat 2s", "next mount"),
        ({}, "fuse.juicefs", None, "fail", "does not say how it is mounted", "client is dead"),
    ],
)
def test_juicefs_mount_that_is_unsafe_or_differs_from_its_declaration(
    tmp_path: Path, declared: Any, kind: str, options: Any, outcome: str, found: str, next_step: str
) -> None:
    def read(_mount: Path) -> ClientOptions:
        if options is None:
            raise OSError("Transport endpoint is not connected")
        return replace(SAFE, **options)

    (check,) = juicefs_mount(tmp_path, {**DECLARED, **declared}, table(tmp_path, kind), read)
    assert check.outcome.value == outcome
    assert found in check.found
    assert next_step in check.next_step


def test_folder_of_a_local_file_system_passes_without_juicefs(tmp_path: Path) -> None:
    (check,) = storage_checks(tmp_path / "not" / "there", None, table(tmp_path, "ext4"))
    assert check.outcome is Outcome.PASS
    assert "space and inodes" in check.found


def test_declared_juicefs_on_a_local_disk_fails(tmp_path: Path) -> None:
    mount, storage = storage_checks(tmp_path, DECLARED, table(tmp_path, "ext4"))
    assert (mount.outcome, storage.outcome) == (Outcome.FAIL, Outcome.PASS)


def test_dead_client_is_named_where_nothing_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disconnected(_self: Path) -> bool:
        raise OSError(107, "Transport endpoint is not connected")

    monkeypatch.setattr(Path, "exists", disconnected)
    (check,) = storage_checks(tmp_path, None, "")
    assert check.outcome is Outcome.FAIL
    assert "Transport endpoint is not connected" in check.found
    assert "mount it anew" in check.next_step


def two_mounts(folder: Path, kind: str = "nfs4") -> tuple[Path, Path, str]:
    """Two mount points that show the same folder, the second through a link, and their table."""
    first, second = folder / "a", folder / "b"
    first.mkdir()
    second.mkdir()
    (first / "run").mkdir()
    (second / "run").symlink_to(first / "run")
    return first, second, f"{table(first, kind)}3 1 0:6 / {second} rw - {kind} x rw\n"


def test_second_mount_is_tried_in_the_same_folder(tmp_path: Path) -> None:
    first, second, mounts = two_mounts(tmp_path)
    (check,) = mount_peer_checks(first / "run", second, mounts)
    assert check.outcome is Outcome.PASS
    (second / "run").unlink()
    (second / "run").mkdir()
    (other,) = mount_peer_checks(first / "run", second, mounts)
    assert other.outcome is Outcome.FAIL


def test_peer_on_the_same_mount_is_no_other_client(tmp_path: Path) -> None:
    first, _, mounts = two_mounts(tmp_path)
    (check,) = mount_peer_checks(first, first / "run", mounts)
    assert check.outcome is Outcome.FAIL
    assert "is on the same mount" in check.found
    assert "Name another mount" in check.next_step


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ({"volume_id": "w"}, "it is another volume (w, not v)"),
        ({"session": 3}, "it is the same client (session 3)"),
    ],
)
def test_juicefs_peer_must_be_another_client_of_the_same_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: dict[str, Any], found: str
) -> None:
    first, second, mounts = two_mounts(tmp_path, "fuse.juicefs")
    options = {first: SAFE, second: replace(SAFE, **{"session": 4, **there})}
    monkeypatch.setattr("pipeline.doctor.storage.read_options", options.__getitem__)
    check, *_ = mount_peer_checks(first, second, mounts)
    assert check.outcome is Outcome.FAIL
    assert found in check.found


class Frozen(FolderClient):
    """Never sees a file grow."""

    def read_once(self, name: str) -> bytes | None:
        content = super().read_once(name)
        return None if content is None else content[:16]


def test_client_that_does_not_see_growth_fails_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_client, "WAIT_S", 0.0)
    check = two_clients_check(tmp_path, "host", Frozen)
    assert check.outcome is Outcome.FAIL
    assert "growth: after 100 bytes were appended and synced, the other client sees 16 of 101 bytes" in check.found
    assert list(tmp_path.iterdir()) == []


def test_run_on_a_mount_that_is_not_as_declared_is_refused_with_the_reason(tmp_path: Path) -> None:
    declaration = tmp_path / "declaration.json"
    declaration.write_bytes(b'{"direct_mount": true}')
    queue = settings_of(
        tmp_path, "--rollout-storage-profile", "juicefs", "--rollout-storage-declaration", str(declaration)
    ).queue
    with pytest.raises(StorageError) as refusal:
        prove_here(tmp_path / "pool", queue)
    assert f"The queue can't lie in {tmp_path / 'pool'}. JuiceFS mount: {tmp_path} lies on" in str(refusal.value)
    assert f"`vime doctor --storage {tmp_path / 'pool'}` checks again" in refusal.value.next_step


def test_transport_without_a_folder_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_proof, "storage_checks", lambda *_: pytest.fail("the folder was tried"))
    prove_here(tmp_path, QueueSettings())
