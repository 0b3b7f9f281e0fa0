"""The systemd unit and the Kubernetes files mount as `up.sh` does."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.juicefs.mounts import HEARTBEAT, TRASH_DAYS, mount_command
from deploy.juicefs.services import redis_settings
from deploy.juicefs.volume import Volume
from tests.juicefs.two_mounts import SCRIPTS

FORBIDDEN = ("writeback", "writeback_cache", "readdir-cache", "attr-cache", "entry-cache", "dir-entry-cache")
OWN = ("--background", "--metrics", "--log")
"""What only `up.sh` needs: servers of its own, on any port."""


def options(words: list[str]) -> dict[str, str]:
    """Flag -> value of a command line; a switch has none."""
    return {
        word: words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("-") else ""
        for at, word in enumerate(words)
        if word.startswith("--")
    }


def test_systemd_unit_mounts_with_the_options_of_up(tmp_path: Path) -> None:
    unit = (SCRIPTS / "systemd" / "vime-juicefs@.service").read_text()
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    volume = Volume.of(tmp_path)
    volume.request.mounts = [str(tmp_path / "mnt")]
    expected = options(mount_command(volume, Path("juicefs"), tmp_path / "mnt"))
    found = options(shlex.split(line))
    places = ("--bucket", "--cache-dir", "--cache-size")
    assert {**found, **dict.fromkeys(places)} == {
        **{flag: value for flag, value in expected.items() if flag not in OWN},
        **dict.fromkeys(places),
    }
    assert not any(f"--{word}" in found for word in FORBIDDEN)


def test_redis_settings_for_a_cluster_sync_and_keep_as_those_of_up(tmp_path: Path) -> None:
    def settings(text: str) -> dict[str, str]:
        lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
        return {name: value for name, value in lines}  # noqa: C416

    found = settings((SCRIPTS / "systemd" / "redis.conf").read_text())
    ours = settings(redis_settings(Volume.of(tmp_path)))
    keeping = ("appendonly", "appendfsync", "save", "maxmemory-policy")
    assert {name: found[name] for name in keeping} == {name: ours[name] for name in keeping}


@pytest.fixture
def manifests() -> dict[str, Any]:
    documents = yaml.safe_load_all((SCRIPTS / "kubernetes" / "volume.yaml").read_text())
    return {document["kind"]: document for document in documents}


def test_kubernetes_volume_is_mounted_with_the_required_options(manifests: dict[str, Any]) -> None:
    mount_options = manifests["PersistentVolume"]["spec"]["mountOptions"]
    assert {f"heartbeat={HEARTBEAT}", "open-cache=0", "backup-meta=0"} <= set(mount_options)
    assert not {option.partition("=")[0] for option in mount_options} & set(FORBIDDEN)
    assert manifests["Secret"]["stringData"]["format-options"] == f"trash-days={TRASH_DAYS}"


def test_kubernetes_objects_refer_to_each_other(manifests: dict[str, Any]) -> None:
    volume, claim = manifests["PersistentVolume"], manifests["PersistentVolumeClaim"]
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    classes = {claim["spec"]["storageClassName"], volume["spec"]["storageClassName"]}
    assert classes == {manifests["StorageClass"]["metadata"]["name"]}
    secret = volume["spec"]["csi"]["nodePublishSecretRef"]
    assert secret == {key: manifests["Secret"]["metadata"][key] for key in ("name", "namespace")}
    assert claim["spec"]["accessModes"] == volume["spec"]["accessModes"] == ["ReadWriteMany"]
    job = yaml.safe_load((SCRIPTS / "kubernetes" / "check.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
