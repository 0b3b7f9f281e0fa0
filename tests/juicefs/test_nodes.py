"""Nodes of a Ray cluster that have the queue's folder at the same path, each through a client of its own.

A node is a raylet in a mount namespace of its own, where something else lies at the path of the mount.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import ray

from deploy.juicefs.mounts import mount_command
from deploy.juicefs.packages import find_juicefs
from deploy.juicefs.processes import end, own_environment
from deploy.juicefs.volume import Volume, choose_port
from tests.juicefs.two_mounts import ROOT, TwoMounts

pytestmark = [
    pytest.mark.juicefs,
    pytest.mark.slow,
    pytest.mark.multiproc,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can give a process mounts of its own"),
]
READY_S = 90.0
PROVE = """
import asyncio, pathlib, sys, ray
from pipeline.storage_proof import prove_nodes
from tests.juicefs.test_smoke import queue_settings
from vime.errors import StorageError
ray.init(log_to_driver=False, logging_level="ERROR")
try:
    asyncio.run(prove_nodes(pathlib.Path(sys.argv[1]), queue_settings(pathlib.Path(sys.argv[2]))))
except StorageError as error:
    print(error)
"""
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def cluster(session_volume: TwoMounts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs Python words as a driver in a cluster whose nodes `good`, `unsafe` and `absent` have at the mount's path
    another client, another client with write-back, and nothing.
    """
    session_volume.up()
    folder = session_volume.folder
    address = f"{ray.util.get_node_ip_address()}:{choose_port(0)}"
    temporary = Path(tempfile.mkdtemp(prefix="vime-ray-"))  # a socket's path must be short
    logs = tmp_path_factory.mktemp("nodes")
    ray_settings = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
    environment = {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", **Volume.of(folder).credentials()}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words], env={**session_volume.environment(), **ray_settings}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip

    with ExitStack() as exits:
        exits.callback(shutil.rmtree, temporary, ignore_errors=True)
        commands = node_commands(session_volume, address, temporary)
        for name, command in commands.items():
            with (logs / name).open("wb") as log:
                process = subprocess.Popen(
                    command, env=own_environment(folder, name, environment), stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
            exits.callback(process.wait, timeout=30)
            exits.callback(end, folder, name, grace_s=2.0)
            if name == "head":
                wait_started(logs / name)
        for name in commands:
            wait_started(logs / name)
        yield run


def node_commands(volume: TwoMounts, address: str, temporary: Path) -> dict[str, list[str]]:
    """Name -> command of a node that runs until it is ended."""
    mount = mount_command(Volume.of(volume.folder), find_juicefs(), volume.here)
    unsafe = [*mount[:-2], "--writeback", *mount[-2:]]
    clear = shlex.join(["umount", "-l", str(volume.here)])
    first = {"good": f"{clear} && {shlex.join(mount)} && ", "unsafe": f"{clear} && {shlex.join(unsafe)} && "}
    first["absent"] = f"{clear} && "
    common = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
    common += ["--num-cpus", "1", "--object-store-memory", "80000000"]
    head = ["--head", "--port", address.partition(":")[2], "--temp-dir", str(temporary), "--include-dashboard", "false"]
    commands = {"head": [*common, *head, "--node-name", "head"]}
    for name, before in first.items():
        join = shlex.join([*common, "--address", address, "--node-name", name])
        commands[name] = ["unshare", "--mount", "--propagation", "private", "bash", "-c", f"{before}exec {join}"]
    return commands


def wait_started(log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while "Ray runtime started" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.25)


def test_node_with_a_client_of_its_own_at_the_same_path_passes(volume: TwoMounts, cluster: Run) -> None:
    folder = volume.new_folder()
    declaration = ["--rollout-storage-declaration", str(volume.declaration_path)]
    done = cluster("-m", "vime", "doctor", "--storage", str(folder), "--peer", "good", *declaration)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{folder}: same folder, growth, zero tail, fsync of an open file, rename over a file, lock" in done.stdout
    assert list(folder.iterdir()) == []


def test_run_is_refused_with_the_reason_of_each_node(volume: TwoMounts, cluster: Run) -> None:
    folder = volume.new_folder()
    done = cluster("-c", PROVE, str(folder), str(volume.declaration_path))
    assert f"storage on absent on {socket.gethostname()}: {folder}: {folder} does not exist there" in done.stdout
    assert "writeback is on, allowed: off" in done.stdout
    assert "good on" not in done.stdout
    assert "Mount it at the same path on every node." in done.stdout


def test_node_that_nobody_knows_is_told_with_those_that_are_there(volume: TwoMounts, cluster: Run) -> None:
    done = cluster("-m", "vime", "doctor", "--storage", str(volume.here), "--peer", "nobody")
    assert done.returncode == 2
    assert "0 live nodes of the Ray cluster are called 'nobody'; there are: " in done.stdout
    assert "absent on" in done.stdout
