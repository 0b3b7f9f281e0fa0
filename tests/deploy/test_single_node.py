"""The JuiceFS command for one machine: its refusals, and a stream on a real mount that survives a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.pool import Pool
from tests.pipeline.mini_stream import BATCH, ROLLOUTS

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "deploy" / "juicefs"
STREAM = ROOT / "tests" / "pipeline" / "mini_stream.py"
MISSING = next(
    (
        reason
        for reason, holds in (
            ("/dev/fuse is missing or may not be used", not os.access("/dev/fuse", os.R_OK | os.W_OK)),
            ("fusermount3 is missing (apt-get install fuse3)", shutil.which("fusermount3") is None),
            ("the juicefs binary is missing (make setup)", not Path(sys.executable).with_name("juicefs").exists()),
        )
        if holds
    ),
    "",
)

sys.path.insert(0, str(SCRIPTS))
import mount_facts  # noqa: E402
import single_node  # noqa: E402


def call(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(SCRIPTS / "single_node.py"), command, str(folder)]
    return subprocess.run(words, capture_output=True, text=True, timeout=90, check=False)


def test_a_machine_without_fuse_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(single_node.NodeError, match=r"modprobe fuse.*--device /dev/fuse"):
        single_node.check_machine(device=tmp_path / "fuse")


def test_a_user_without_rights_or_fusermount_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "fuse"
    device.touch()
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with pytest.raises(single_node.NodeError, match=r"apt-get install fuse3"):
        single_node.check_machine(device=device, find=lambda _: None)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(single_node.NodeError, match=r"User 1000 may not use .*fuse\. Run this as root"):
        single_node.check_machine(device=device)


def test_a_folder_without_a_mount_has_no_status_and_nothing_to_take_down(tmp_path: Path) -> None:
    done = call("status", tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path}/mnt is not mounted. Run `up`." in done.stderr
    assert call("down", tmp_path).returncode == 0


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[single_node.Node]:
    if MISSING:
        pytest.skip(MISSING)
    node = single_node.Node(tmp_path / "volume with a blank")
    done = call("up", node.folder)
    try:
        assert done.returncode == 0, done.stderr
        assert f"--rollout-storage-profile juicefs --rollout-storage-declaration {node.declaration}" in done.stdout
        yield node
    finally:
        if call("down", node.folder).returncode != 0:  # a failed test may still have a file open
            subprocess.run(["umount", "-l", str(node.mount)], check=False)
            for pid in mount_facts.client_processes(node.folder):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.juicefs
@pytest.mark.slow
def test_a_stream_on_the_mount_survives_a_kill_and_down_leaves_nothing(mounted: single_node.Node) -> None:
    run = mounted.mount / "run"
    (run / "training_log").mkdir(parents=True)
    declaration = json.loads(mounted.declaration.read_text())
    Pool.create(run / "rollout_data" / "pool", "rollout", profile="juicefs", declaration=declaration).close()

    killed = subprocess.run([sys.executable, str(STREAM), str(run), "accept", "3", "1000"], check=False)
    assert killed.returncode == -signal.SIGKILL
    resumed = subprocess.run([sys.executable, str(STREAM), str(run), "done", "2", "1000"], check=False)
    assert resumed.returncode == 0

    audit = subprocess.run(
        [sys.executable, "-m", "vime", "audit", str(run)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert json.loads(audit.stdout)["trained"] == ROLLOUTS * BATCH

    clients = mount_facts.client_processes(mounted.folder)
    assert len(clients) == 2
    done = call("down", mounted.folder)
    assert done.returncode == 0, done.stderr
    assert mount_facts.mounted_type(mounted.mount) is None
    assert mount_facts.client_processes(mounted.folder) == []


@pytest.mark.juicefs
@pytest.mark.slow
def test_the_declaration_says_what_the_client_says_and_data_outlives_the_mount(mounted: single_node.Node) -> None:
    config = mount_facts.read_client_config(mounted.mount)
    assert (config.writeback, config.open_cache, config.readdir_cache) == (False, 0, False)
    assert (config.heartbeat_s, config.trash_days) == (2, 1)
    assert json.loads(mounted.declaration.read_text())["client_version"] == config.version
    (mounted.mount / "kept").write_text("here")
    again = call("up", mounted.folder)
    assert again.returncode == 1
    assert "is already mounted (fuse.juicefs)" in again.stderr
    assert call("down", mounted.folder).returncode == 0
    assert call("up", mounted.folder).returncode == 0
    assert (mounted.mount / "kept").read_text() == "here"


@pytest.mark.juicefs
@pytest.mark.slow
def test_a_busy_mount_names_its_user_and_a_dead_client_loses_no_synced_file(mounted: single_node.Node) -> None:
    with (mounted.mount / "synced").open("w") as file:
        file.write("here")
        file.flush()
        os.fsync(file.fileno())
        busy = call("down", mounted.folder)
    assert busy.returncode == 1
    assert f"In use by: {os.getpid()} " in busy.stderr
    for pid in mount_facts.client_processes(mounted.folder):
        os.kill(pid, signal.SIGKILL)
    dead = call("status", mounted.folder)
    assert dead.returncode == 1
    assert "the JuiceFS client doesn't answer" in dead.stderr
    assert call("down", mounted.folder).returncode == 0
    assert mount_facts.mounted_type(mounted.mount) is None
    assert call("up", mounted.folder).returncode == 0
    assert (mounted.mount / "synced").read_text() == "here"
