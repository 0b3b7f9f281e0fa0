"""Real mounts with one unsafe option each: refused by what the client says, and where it shows, by what is seen."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deploy.juicefs.packages import find_juicefs
from deploy.juicefs.processes import own_environment, run
from deploy.juicefs.volume import Volume
from pipeline.doctor.check import Check, Outcome
from pipeline.doctor.storage import mount_peer_checks, storage_checks, two_clients_check
from storage.folder_client import FolderClient
from tests.juicefs.two_mounts import TwoMounts
from vime.cli.main import main

pytestmark = [pytest.mark.juicefs, pytest.mark.slow, pytest.mark.timeout(300)]
OPTIONS = {
    "write-back": (("--writeback",), "writeback is on, allowed: off"),
    "kernel write-back": (("-o", "writeback_cache"), "the kernel's write-back cache (-o writeback_cache) is on"),
    "open cache": (("--open-cache", "60"), "open-cache is 60 s, allowed: 0"),
    "folder cache": (("--readdir-cache",), "readdir-cache is on, allowed: off"),
    "attribute cache": (("--attr-cache", "60"), "cached for 60 s, allowed: at most 1"),
    "absent file cache": (("--negative-entry-cache", "60"), "cached for 60 s, allowed: at most 1"),
    "read-only": (("--read-only",), "it is read-only"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_peer_with_an_unsafe_option_is_refused_by_what_its_client_says(volume: TwoMounts, name: str) -> None:
    options, words = OPTIONS[name]
    with volume.third_mount(*options) as mount:
        checks = mount_peer_checks(volume.new_folder(), mount)
    assert [check.outcome for check in checks] == [Outcome.FAIL]
    assert words in checks[0].found


def seen_through(volume: TwoMounts, mount: Path) -> Check:
    """What two clients see of each other, the options unread."""
    folder = volume.new_folder()
    return two_clients_check(folder, "third", lambda made: FolderClient(mount / made.relative_to(volume.here)))


def test_appended_data_that_the_kernel_holds_back_is_seen_to_be_missing(volume: TwoMounts) -> None:
    with volume.third_mount("-o", "writeback_cache") as mount:
        check = seen_through(volume, mount)
    assert check.outcome is Outcome.FAIL
    assert "growth: " in check.found
    assert "bytes were appended and synced, the other client sees" in check.found


def test_entries_that_are_cached_for_long_are_seen_to_be_old(volume: TwoMounts) -> None:
    with volume.third_mount("--attr-cache", "60", "--entry-cache", "60", "--dir-entry-cache", "60") as mount:
        check = seen_through(volume, mount)
    assert check.outcome is Outcome.FAIL
    assert "rename over a file: the other client sees the replaced file for more than" in check.found


def test_file_that_vanishes_when_it_is_replaced_without_a_trash_is_seen_to_be_missing(own: TwoMounts) -> None:
    own.up()
    described = Volume.of(own.folder)
    words = [str(find_juicefs()), "config", described.meta_url, "--trash-days", "0", "--yes"]
    run(words, own_environment(own.folder, "config", described.credentials()))
    own.down()
    own.up()
    checks = [*storage_checks(own.here, own.declaration), *mount_peer_checks(own.here, own.there)]
    assert [check.outcome for check in checks] == [Outcome.WARN, Outcome.PASS, Outcome.FAIL]
    assert "trash-days is 0" in checks[0].found
    assert "rename over a file: a file that was replaced is missing for the other client" in checks[2].found


def test_doctor_names_the_option_and_ends_with_2(volume: TwoMounts, capsys: pytest.CaptureFixture[str]) -> None:
    declaration = ["--rollout-storage-declaration", str(volume.declaration_path)]
    with volume.third_mount("--writeback") as mount:
        assert main(["doctor", "--storage", str(volume.here), "--peer", str(mount), *declaration]) == 2
        assert "writeback is on, allowed: off" in capsys.readouterr().out
        assert main(["doctor", "--storage", str(mount), *declaration]) == 2
    out = capsys.readouterr().out
    assert "writeback is declared False, the client says True" in out
    assert main(["doctor", "--storage", str(volume.here), "--peer", str(volume.there), *declaration]) == 0


def test_folder_of_a_dead_client_is_refused_with_the_reason(
    volume: TwoMounts, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = volume.new_folder()
    volume.kill_client(volume.here)
    assert main(["doctor", "--storage", str(folder)]) == 2
    out = capsys.readouterr().out
    assert "Transport endpoint is not connected" in out or "Software caused connection abort" in out
    assert "unmount it and mount it anew" in out
    volume.up()
    shutil.rmtree(folder)
