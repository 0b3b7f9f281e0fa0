"""Numbers of versions never come twice, whatever became of the session that used them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from pipeline import known_versions
from pipeline.known_versions import TriedVersions, highest_known_version
from pipeline.run_folder import RunFolder
from pipeline.session_start import Start
from recovery.commit import CommitRecord
from recovery.restore import RestoreMode, RestorePlan
from vime.errors import CorruptDataError, PublicationError


class Knows:
    """In place of the queue and the trainer's ranks."""

    def __init__(self, version: int) -> None:
        self._version = version

    async def highest_version(self) -> int:
        return self._version

    async def highest_version_on_disk(self) -> int:
        return self._version


def start_at(weight_version: int | None) -> Start:
    commit = None if weight_version is None else CommitRecord(3, "a", None, weight_version, "run", "data", {})
    return Start(RestorePlan(RestoreMode.RESUME, ".", 4), "b", None, commit, None)


@pytest.mark.parametrize("highest", ["commit", "kept", "tried", "queue", "disk", "nobody"])
async def test_a_session_begins_above_every_version_that_anybody_knows_of(tmp_path: Path, highest: str) -> None:
    folder = RunFolder(tmp_path, tmp_path / "pool")
    known = dict.fromkeys(["commit", "kept", "tried", "queue", "disk"], 2) | {highest: 9}
    TriedVersions(folder.tried_version).note(known["tried"])
    found = await highest_known_version(
        folder, start_at(known["commit"]), Knows(known["queue"]), Knows(known["disk"]), known["kept"]
    )
    assert found == (2 if highest == "nobody" else 9)


async def test_a_new_run_begins_at_zero(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, tmp_path / "pool")
    assert await highest_known_version(folder, start_at(None), Knows(0), Knows(0), None) == 0


def test_what_was_tried_is_remembered_and_never_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "rollout" / "tried_version.json"
    TriedVersions(path).note(7)
    TriedVersions(path).note(3)
    assert TriedVersions(path).highest() == 7


def test_a_note_that_is_late_does_not_undo_a_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, goes_on, write = threading.Event(), threading.Event(), known_versions.write_atomically

    def late(path: Path, content: bytes) -> None:
        if b"5" in content:
            writing.set()
            assert goes_on.wait(10)
        write(path, content)

    monkeypatch.setattr(known_versions, "write_atomically", late)
    tried = TriedVersions(tmp_path / "tried_version.json")
    with ThreadPoolExecutor(2) as threads:
        given_up = threads.submit(tried.note, 5)
        assert writing.wait(10)
        wait([following := threads.submit(tried.note, 6)], timeout=0.2)
        goes_on.set()
        given_up.result(10)
        following.result(10)
    assert tried.highest() == 6


def test_a_number_that_can_not_be_kept_is_not_to_be_tried(tmp_path: Path) -> None:
    (tmp_path / "rollout").touch()
    with pytest.raises(PublicationError, match="Version 4 is not published, for its number can't be kept"):
        TriedVersions(tmp_path / "rollout" / "tried_version.json").note(4)


def test_a_damaged_record_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tried_version.json"
    path.write_text("{")
    with pytest.raises(CorruptDataError, match=r"tried_version\.json can't be read"):
        TriedVersions(path).highest()
