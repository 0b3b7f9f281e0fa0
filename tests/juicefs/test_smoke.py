"""The short tour of JuiceFS that `make test` takes: mounts, preflight, refusals, and a stream that is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.doctor.check import Outcome
from pipeline.doctor.storage import mount_peer_checks, storage_checks
from pipeline.storage_proof import prove_here
from tests.juicefs.two_mounts import ROOT, TwoMounts
from tests.pipeline.mini_stream import BATCH, ROLLOUTS
from vime.errors import StorageError
from vime.settings.groups.queue import QueueSettings

pytestmark = [pytest.mark.juicefs, pytest.mark.timeout(120)]
STREAM = ROOT / "tests" / "pipeline" / "mini_stream.py"


def queue_settings(declaration: Path) -> QueueSettings:
    return QueueSettings(
        rollout_data_transport="straw",
        rollout_storage_profile="juicefs",
        rollout_storage_declaration=str(declaration),
    )


def test_two_clients_as_up_mounts_them_pass_the_preflight(volume: TwoMounts) -> None:
    folder = volume.new_folder()
    checks = [*storage_checks(folder, volume.declaration), *mount_peer_checks(folder, volume.there)]
    assert [(check.name, check.outcome) for check in checks] == [
        ("JuiceFS mount", Outcome.PASS),
        ("storage", Outcome.PASS),
        (f"two clients ({volume.there})", Outcome.PASS),
    ], checks
    assert list(folder.iterdir()) == []
    prove_here(folder, queue_settings(volume.declaration_path))


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("writeback", True, "the declaration says writeback True, allowed: False"),
        ("client_version", "1.0.0", "client_version is declared '1.0.0', the client says"),
    ],
)
def test_false_declaration_is_refused(volume: TwoMounts, tmp_path: Path, key: str, value: object, found: str) -> None:
    declaration = tmp_path / "declaration.json"
    declaration.write_text(json.dumps({**volume.declaration, key: value}))
    with pytest.raises(StorageError, match=found):
        prove_here(volume.new_folder(), queue_settings(declaration))


def test_true_declaration_of_another_mount_is_refused_on_a_local_disk(volume: TwoMounts, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"lies on .*, not on fuse.juicefs"):
        prove_here(tmp_path / "pool", queue_settings(volume.declaration_path))


def test_mount_with_write_back_is_refused_however_it_is_declared(volume: TwoMounts) -> None:
    refusal = pytest.raises(StorageError, match=r"writeback is on, allowed: off .* writeback is declared False")
    with volume.third_mount("--writeback") as mount, refusal:
        prove_here(mount / "pool", queue_settings(volume.declaration_path))


def test_stream_over_two_clients_that_is_killed_loses_nothing(volume: TwoMounts) -> None:
    folder = volume.new_folder()
    (folder / "training_log").mkdir()
    words = [sys.executable, str(STREAM), str(folder)]
    killed = subprocess.run([*words, "accept", "3", "1000"], env=volume.environment(), check=False)
    assert killed.returncode == -signal.SIGKILL
    subprocess.run([*words, "none", "1", "1000"], env=volume.environment(), check=True)

    command = [sys.executable, "-m", "vime", "audit", str(folder)]
    audit = subprocess.run(command, env=volume.environment(), capture_output=True, text=True, check=False)
    assert audit.returncode == 0, audit.stdout + audit.stderr  # the identity holds, nothing lost, nothing twice
    report = json.loads(audit.stdout)
    assert (report["trained"], report["in_flight"]) == (ROLLOUTS * BATCH, 0)
