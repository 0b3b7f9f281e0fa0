"""The driver renews the lease of its kept engines, tells of those that go on, and ends those that nobody wants."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest

from pipeline import kept_engines
from pipeline.kept_engines import KeptOnDisk, end_claims, engine_lease, kept_on_disk
from pipeline.run_folder import RunFolder
from vime.backends.vllm_utils.lease import (
    LEASE,
    Claim,
    KeptProcess,
    claim_path,
    here,
    remove_claim,
    write_claim,
    write_process,
)
from vime.backends.vllm_utils.supervisor import start_time
from vime.settings.groups import Settings
from vime.settings.parse import parse_settings


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path, tmp_path / "pool")
    made.make()
    return made


def settings_of(session: str | None, keep_s: float = 600.0) -> Settings:
    settings = parse_settings(["--rollout-num-gpus", "1", "--rollout-num-gpus-per-engine", "1"])
    queue = dataclasses.replace(settings.queue, rollout_session_id=session, rollout_session_timeout=keep_s)
    return dataclasses.replace(settings, queue=queue)


def claimed(folder: RunFolder, name: str, *, place: str | None = None, pid: int | None = None) -> None:
    path = claim_path(folder.kept_engines, name)
    write_claim(
        path, Claim(name, "127.0.0.1", 1, place or here(), 0.0, str(folder.root / "none"), {"session id": "nightly"})
    )
    if pid is not None:
        write_process(path, KeptProcess(name, pid, start_time(pid)))


def beat(folder: RunFolder) -> str:
    return str(json.loads((folder.kept_engines / LEASE).read_text())["beat"])


def test_the_lease_is_renewed_while_the_session_lasts_and_removed_when_no_engine_is_left(folder: RunFolder) -> None:
    notes: list[str] = []
    with engine_lease(settings_of("nightly", 0.2), folder, notes.append):
        first, deadline = beat(folder), time.monotonic() + 20
        while beat(folder) == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not (folder.kept_engines / LEASE).exists()
    assert notes == []


def test_engines_that_go_on_are_told_with_how_to_end_them(folder: RunFolder) -> None:
    notes: list[str] = []
    with engine_lease(settings_of("nightly"), folder, notes.append):
        claimed(folder, "engine_0", pid=os.getpid())
    assert notes == [
        "1 engine (engine_0) kept for a restart with --rollout-session-id nightly, at most 600 s; to end them now: "
        f"kill {os.getpid()}."
    ]
    assert (folder.kept_engines / LEASE).exists()


def test_what_a_session_leaves_is_told_apart_by_where_it_runs(folder: RunFolder) -> None:
    claimed(folder, "engine_0", pid=os.getpid())
    claimed(folder, "engine_1", place="another machine", pid=os.getpid())
    claimed(folder, "engine_2")
    assert kept_on_disk(folder.kept_engines) == KeptOnDisk({"engine_0": os.getpid()}, ["engine_1"], "nightly")


@pytest.mark.parametrize(("session", "left"), [("nightly", ["engine_0"]), (None, [])])
def test_engines_that_a_session_does_not_want_are_ended_at_its_start(
    folder: RunFolder, session: str | None, left: list[str]
) -> None:
    for number in range(2):
        claimed(folder, f"engine_{number}")
    notes: list[str] = []
    with engine_lease(settings_of(session), folder, notes.append):
        found = [name for name, _ in kept_engines.claims(folder.kept_engines)]
        assert found == left
        for name in found:
            remove_claim(claim_path(folder.kept_engines, name))
    (note,) = notes
    assert note.endswith("and were ended: " + ", ".join(n for n in ("engine_0", "engine_1") if n not in left) + ".")


def test_all_claims_end_but_those_to_keep(folder: RunFolder) -> None:
    for number in range(3):
        claimed(folder, f"engine_{number}")
    assert end_claims(folder.kept_engines, ["engine_1"]) == ["engine_0", "engine_2"]
    assert [name for name, _ in kept_engines.claims(folder.kept_engines)] == ["engine_1"]
