"""`up.sh` and `down.sh` on a real volume: repeated, interrupted, joined from elsewhere, in use, and removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.juicefs.processes import own_processes
from deploy.juicefs.services import GATEWAY, REDIS, ask_redis
from deploy.juicefs.volume import Volume
from storage.juicefs import read_options
from storage.mounts import MOUNT_TABLE, mounted_at
from tests.juicefs.two_mounts import ROOT, TwoMounts, call

pytestmark = [pytest.mark.juicefs, pytest.mark.slow, pytest.mark.timeout(300)]


def processes(volume: TwoMounts) -> dict[str, list[int]]:
    parts = (REDIS, GATEWAY, str(volume.here), str(volume.there))
    return {part: own_processes(volume.folder, part) for part in parts}


def test_options_and_declaration_are_those_of_the_running_clients(volume: TwoMounts) -> None:
    for mount in (volume.here, volume.there):
        options = read_options(mount)
        assert (options.writeback, options.open_cache_s, options.readdir_cache) == (False, 0, False)
        assert (options.heartbeat_s, options.trash_days, options.object_storage) == (2, 1, "s3")
    described = Volume.of(volume.folder)
    password = described.secret(REDIS)
    wanted = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction", "bind": "127.0.0.1"}
    for name, value in wanted.items():
        assert ask_redis(described.meta_url, password, "CONFIG", "GET", name).split("\r\n")[-2] == value
    assert ask_redis(described.meta_url, "wrong", "PING").startswith("-NOAUTH")
    assert volume.declaration["client_version"] == options.version
    assert "appendfsync always" in volume.declaration["durability_description"]
    assert "not safe against power loss" in volume.declaration["durability_description"]


def test_up_again_changes_nothing_and_repairs_only_what_died(volume: TwoMounts) -> None:
    before = processes(volume)
    assert all(before.values())
    volume.up()
    assert processes(volume) == before
    volume.kill_client(volume.there)
    volume.up()
    after = processes(volume)
    assert set(after[str(volume.there)]).isdisjoint(before[str(volume.there)])
    assert {**after, str(volume.there): []} == {**before, str(volume.there): []}


def test_passwords_are_on_no_command_line_and_in_no_readable_file(volume: TwoMounts) -> None:
    described = Volume.of(volume.folder)
    secrets = [described.secret(REDIS), described.secret(GATEWAY)]
    lines = [path.read_bytes() for pid in own_processes(volume.folder) for path in (Path(f"/proc/{pid}/cmdline"),)]
    shown = call("up.sh", volume.folder, "--dry-run").stdout
    assert not any(secret.encode() in line for secret in secrets for line in lines)
    assert not any(secret in shown for secret in secrets)
    holding = [described.redis / "redis.conf", *(described.folder / "secrets").iterdir()]
    assert {path.stat().st_mode & 0o077 for path in holding} == {0}


def test_data_outlives_down_and_purge_leaves_nothing(own: TwoMounts) -> None:
    own.up()
    (own.here / "kept").write_text("here")
    own.down()
    assert processes(own) == {REDIS: [], GATEWAY: [], str(own.here): [], str(own.there): []}
    assert [mounted_at(mount, MOUNT_TABLE.read_text()) for mount in (own.here, own.there)] == [None, None]
    own.down()
    own.up()
    assert (own.there / "kept").read_text() == "here"
    own.down("--purge")
    assert list(own.folder.iterdir()) == []


def test_metadata_that_was_acknowledged_outlives_the_kill_of_redis(own: TwoMounts) -> None:
    """Redis, the gateway and both clients die at once; what was synced is there after `up.sh`."""
    own.up()
    with (own.here / "synced").open("wb") as file:
        file.write(b"here")
        file.flush()
        os.fsync(file.fileno())
    for pid in own_processes(own.folder):
        os.kill(pid, 9)
    deadline = time.monotonic() + 10
    while own_processes(own.folder):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    own.up()
    assert (own.there / "synced").read_bytes() == b"here"


def test_mount_in_use_is_refused_naming_the_user(own: TwoMounts) -> None:
    own.up()
    holder = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, cwd=own.here, env={**os.environ, "PWD": "/"}
    )
    try:
        done = call("down.sh", own.folder)
        assert done.returncode == 1
        assert f"{own.here} can't be unmounted" in done.stderr
        assert f"In use by: {holder.pid} " in done.stderr
        assert len(own_processes(own.folder, REDIS)) == 1
    finally:
        holder.communicate(b"\n", timeout=20)


def test_another_host_joins_a_volume_by_its_bucket_and_metadata(
    own: TwoMounts, volume: TwoMounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also how a bucket and a metadata engine that exist are used: both are named, nothing is started."""
    first = Volume.of(volume.folder)
    for name, value in first.credentials().items():
        monkeypatch.setenv(name, value)
    mount = own.folder / "joined"
    words = ["--mount", mount, "--bucket", first.bucket, "--meta-url", first.meta_url]
    done = call("up.sh", own.folder, *words)
    assert done.returncode == 0, done.stderr
    assert own_processes(own.folder, REDIS) == own_processes(own.folder, GATEWAY) == []
    assert read_options(mount).volume_id == read_options(volume.here).volume_id
    declaration = json.loads((own.folder / "declaration.json").read_text())
    assert f"objects: s3 at {first.bucket}; metadata: {first.meta_url} (appendfsync always)" in str(declaration)
    other = call("up.sh", own.folder, "--bucket", "http://elsewhere/b")
    assert other.returncode == 1
    assert f"was made with --bucket {first.bucket}, not http://elsewhere/b" in other.stderr


def test_mount_made_by_somebody_else_is_declared_from_what_its_client_says(volume: TwoMounts) -> None:
    words = [sys.executable, "-m", "deploy.juicefs.declare", str(volume.there), "--durability", "redis and s3"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {**volume.declaration, "durability_description": "redis and s3"}
    with volume.third_mount("--writeback") as mount:
        words[3] = str(mount)
        refused = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "writeback is on" in refused.stderr


def test_object_store_that_cannot_be_reached_is_told_with_its_address(
    own: TwoMounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCESS_KEY", "none")  # without keys the client asks the cloud that it may run in
    monkeypatch.setenv("SECRET_KEY", "none")
    done = call("up.sh", own.folder, "--bucket", "http://127.0.0.1:9/none", "--mount", own.here)
    assert done.returncode == 1
    assert "`juicefs format` ended with status 1" in done.stderr
    assert "s3://127.0.0.1:9/none" in done.stderr


def test_mount_of_somebody_else_is_left_alone(own: TwoMounts, volume: TwoMounts) -> None:
    done = call("up.sh", own.folder, "--mount", volume.there)
    assert done.returncode == 1
    assert f"{volume.there}: fuse.juicefs is mounted there by somebody else" in done.stderr
    assert own_processes(volume.folder, str(volume.there))
    own.down("--purge")
    assert own_processes(volume.folder, str(volume.there))
    assert (volume.there / ".config").exists()
