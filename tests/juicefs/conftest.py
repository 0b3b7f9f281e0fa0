"""One volume for all tests of the session."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.juicefs.mounts import unmount
from deploy.juicefs.packages import find_juicefs
from deploy.juicefs.processes import own_processes
from deploy.juicefs.services import stop_services
from deploy.juicefs.volume import Volume
from tests.juicefs.two_mounts import TwoMounts, call, why_impossible

REQUIRED = "VIME_REQUIRE_JUICEFS"
"""Set by `make test-juicefs`, where a machine that can't mount is a failure."""


@pytest.fixture(scope="session")
def volume_folder() -> Iterator[Path]:
    """Not below pytest's own temporary folders, whose old ones it removes with all that is mounted there."""
    folder = Path(tempfile.mkdtemp(prefix="vime-juicefs-"))
    reason = why_impossible(folder)
    if reason:
        folder.rmdir()
        (pytest.fail if REQUIRED in os.environ else pytest.skip)(reason)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def session_volume(volume_folder: Path) -> Iterator[TwoMounts]:
    volume = TwoMounts(volume_folder)
    try:
        volume.up()
        yield volume
    finally:
        gc.collect()  # straw closes some files only when its objects go, and a failed write leaves them in a cycle
        done = call("down.sh", volume_folder)  # its data, of whole test suites, goes with the folder
        if done.returncode != 0:
            _end_by_force(Volume.of(volume_folder))
        assert own_processes(volume_folder) == [], done.stderr
        assert done.returncode == 0, done.stderr


@pytest.fixture
def volume(session_volume: TwoMounts) -> TwoMounts:
    """The session's volume with both clients alive, whatever the test before did to them."""
    session_volume.up()
    return session_volume


@pytest.fixture
def own(volume_folder: Path) -> Iterator[TwoMounts]:
    """A second volume beside the session's, with a blank in its name; taken down by the test or after it."""
    volume = TwoMounts(volume_folder / "its own")
    yield volume
    done = call("down.sh", volume.folder, "--purge")
    assert done.returncode == 0, done.stderr
    assert own_processes(volume.folder) == []


def _end_by_force(volume: Volume) -> None:
    """After a failed test that still holds files open: cut the clients off, so that nothing stays mounted."""
    for mount in volume.mounts:
        TwoMounts(volume.folder).kill_client(mount)
        unmount(volume, find_juicefs(), mount)
    stop_services(volume)
