"""A node of a Ray cluster that has the queue's folder at the same path, through a client of its own.

The node is a raylet in a mount namespace of its own, in which something else can lie at the path of the mount.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray

from deploy.juicefs.mounts import mount_command
from deploy.juicefs.packages import find_juicefs
from deploy.juicefs.processes import end, own_environment, run, start
from deploy.juicefs.volume import Volume, choose_port
from tests.juicefs.two_mounts import ROOT, TwoMounts

pytestmark = [
    pytest.mark.juicefs,
    pytest.mark.slow,
    pytest.mark.multiproc,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can give a process mounts of its own"),
]
READY_S = 120
PROVE = """
import asyncio, pathlib, sys, ray
from pipeline.storage_proof import prove_nodes
from tests.juicefs.test_smoke import queue_settings
from vime.errors import StorageError
ray.init(log_to_driver=False, logging_level="ERROR")
try:
    asyncio.run(prove_nodes(pathlib.Path(sys.argv[1]), queue_settings(pathlib.Path(sys.argv[2]))))
    print("proved")
except StorageError as error:
    print(error)
"""
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
"""The cluster is on this machine alone."""


@dataclass(frozen=True)
class Cluster:
    """Two nodes: `head`, which has the mounts of this process, and `other`."""

    volume: TwoMounts
    address: str
    other: int
    """Process id, for its namespace."""

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run Python as a driver on the head."""
        environment = {**self.volume.environment(), **NO_TOKEN, "RAY_ADDRESS": self.address}
        return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)

    def mount_on_other(self, *options: str) -> None:
        """Give the other node a client of its own at the path of the mount."""
        described = Volume.of(self.volume.folder)
        command = mount_command(described, find_juicefs(), self.volume.here)
        self.clear_other()
        self._on_other([*command[:-2], *options, *command[-2:]])

    def clear_other(self) -> None:
        """Take away what lies at the path of the mount on the other node."""
        here = shlex.quote(str(self.volume.here))
        self._on_other(["sh", "-c", f"while umount -l {here} 2>/dev/null; do :; done"])

    def _on_other(self, command: list[str]) -> None:
        environment = own_environment(self.volume.folder, "other", Volume.of(self.volume.folder).credentials())
        run(["nsenter", "--mount", "--target", str(self.other), *command], environment)


@pytest.fixture(scope="module")
def cluster(session_volume: TwoMounts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    session_volume.up()
    folder = session_volume.folder
    address = f"{ray.util.get_node_ip_address()}:{choose_port(0)}"
    logs = tmp_path_factory.mktemp("nodes")
    environment = {"PYTHONPATH": str(ROOT), **NO_TOKEN}
    with ExitStack() as exits:
        temporary = exits.enter_context(tempfile.TemporaryDirectory(prefix="vime-nodes-", ignore_cleanup_errors=True))
        pid = 0
        for name, command in node_commands(address, temporary).items():
            pid = start_node(command, own_environment(folder, name, environment), logs / name)
            exits.callback(end, folder, name, grace_s=2.0)
        yield Cluster(session_volume, address, pid)


def node_commands(address: str, temporary: str) -> dict[str, list[str]]:
    """Name -> command of a node that runs until it is ended."""
    common = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
    common += ["--num-cpus", "1", "--object-store-memory", "80000000"]
    head = ["--head", "--port", address.partition(":")[2], "--temp-dir", temporary, "--include-dashboard", "false"]
    apart = ["unshare", "--mount", "--propagation", "private"]
    return {
        "head": [*common, *head, "--node-name", "head"],
        "other": [*apart, *common, "--address", address, "--node-name", "other"],
    }


def start_node(command: list[str], environment: dict[str, str], log: Path) -> int:
    """Process id of a node that has started. Ray gives up after 30 s, which a busy machine may need: try again."""
    for attempt in range(3):
        path = log.with_suffix(f".{attempt}")
        process = start(command, environment, path)
        deadline = time.monotonic() + READY_S
        while process.poll() is None:
            if "Ray runtime started" in path.read_text():
                return process.pid
            assert time.monotonic() < deadline, path.read_text()
            time.sleep(0.25)
    pytest.fail(path.read_text())


def test_node_with_a_client_of_its_own_at_the_same_path_passes(volume: TwoMounts, cluster: Cluster) -> None:
    folder = volume.new_folder()
    cluster.mount_on_other()
    declaration = ["--rollout-storage-declaration", str(volume.declaration_path)]
    done = cluster.run("-m", "vime", "doctor", "--storage", str(folder), "--peer", "other", *declaration)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{folder}: same folder, growth, zero tail, fsync of an open file, rename over a file, lock" in done.stdout
    assert list(folder.iterdir()) == []
    start = cluster.run("-c", PROVE, str(folder), str(volume.declaration_path))
    assert start.stdout == "proved\n", start.stderr


def test_run_is_refused_where_a_node_lacks_the_folder(volume: TwoMounts, cluster: Cluster) -> None:
    folder = volume.new_folder()
    cluster.clear_other()
    done = cluster.run("-c", PROVE, str(folder), str(volume.declaration_path))
    assert f"storage on other on {socket.gethostname()}: {folder}: {folder} does not exist there" in done.stdout
    assert "Mount it at the same path on every node." in done.stdout


def test_run_is_refused_where_a_node_has_another_file_system_at_the_path(volume: TwoMounts, cluster: Cluster) -> None:
    cluster.clear_other()
    done = cluster.run("-c", PROVE, str(volume.here), str(volume.declaration_path))
    assert f"{volume.here} lies on" in done.stdout
    assert "not on fuse.juicefs" in done.stdout


def test_run_is_refused_where_a_node_mounts_with_write_back(volume: TwoMounts, cluster: Cluster) -> None:
    folder = volume.new_folder()
    cluster.mount_on_other("--writeback")
    done = cluster.run("-c", PROVE, str(folder), str(volume.declaration_path))
    assert "storage on other on " in done.stdout
    assert "writeback is on, allowed: off" in done.stdout


def test_node_that_nobody_knows_is_told_with_those_that_are_there(volume: TwoMounts, cluster: Cluster) -> None:
    done = cluster.run("-m", "vime", "doctor", "--storage", str(volume.here), "--peer", "nobody")
    assert done.returncode == 2
    assert "0 live nodes of the Ray cluster are called 'nobody'; there are: " in done.stdout
    assert "other on" in done.stdout
