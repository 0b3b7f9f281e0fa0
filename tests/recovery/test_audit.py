"""The independent audit sees what it is there for."""

import json
import shutil
from pathlib import Path

import pytest

from recovery.audit import audit_run
from storage.queue_view import QueueView
from tests.pipeline.mini_stream import BATCH, MEMBERS, ROLLOUTS, run_session
from vime.errors import NoRunError, SchemaVersionError


@pytest.fixture(scope="module", params=[1000, 1], ids=["one segment", "a segment a commit"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("storage.segment_list.MAX_SEGMENT_GROUPS", request.param)
        run_session(run)
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def log_of(run: Path) -> Path:
    return run / "training_log" / "rank_0.jsonl"


def test_a_sound_run_is_counted(run: Path) -> None:
    report = audit_run(run)
    assert (report.generated, report.trained, report.pending) == (ROLLOUTS * BATCH, ROLLOUTS * BATCH, 0)
    assert (report.lost, report.trained_twice, report.rolled_back) == ([], [], 0)
    assert report.identity_holds


def test_a_step_that_no_rank_took_is_lost(run: Path) -> None:
    lines = log_of(run).read_text().splitlines(keepends=True)
    log_of(run).write_text("".join(lines[:2] + lines[3:]))
    report = audit_run(run)
    assert len(report.lost) == BATCH
    assert "committed as trained, but no rank trained it" in report.lost[0]


def test_a_sample_in_two_steps_is_trained_twice(run: Path) -> None:
    lines = [json.loads(line) for line in log_of(run).read_text().splitlines()]
    lines[4]["sample_indices"][0] = lines[1]["sample_indices"][0]
    log_of(run).write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = audit_run(run)
    assert report.trained_twice == [f"sample {lines[1]['sample_indices'][0]}: trained 2 times"]


def test_a_group_of_which_a_member_was_not_trained_is_lost(run: Path) -> None:
    lines = [json.loads(line) for line in log_of(run).read_text().splitlines()]
    missing = lines[0]["sample_indices"].pop()
    log_of(run).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert audit_run(run).lost == [f"group {missing // MEMBERS}: 1 of {MEMBERS} samples trained"]


def test_a_damaged_payload_is_lost(run: Path) -> None:
    needle = bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])  # the token column of a group
    packs = (run / "rollout_data" / "pool" / "raw").rglob("*.pack")
    pack = next(path for path in packs if needle in path.read_bytes())
    content = bytearray(pack.read_bytes())
    content[content.index(needle) + 4] ^= 1
    pack.write_bytes(content)
    (lost,) = audit_run(run).lost
    assert "payload unreadable" in lost


def test_a_group_trained_on_an_abandoned_branch_only_is_rolled_back(run: Path) -> None:
    entry = json.loads(log_of(run).read_text().splitlines()[-1])
    with (run / "rollout" / "branches.jsonl").open("a") as file:
        parent = {"branch": entry["branch"], "rollout_id": entry["rollout_id"] - 1}
        file.write(json.dumps({"branch": "later", "parent": parent, "directory": ".", "start_version": 1}) + "\n")
    assert audit_run(run).rolled_back == BATCH


def test_a_closed_segment_that_counts_otherwise_than_its_journal_is_told(run: Path) -> None:
    path = run / "rollout_data" / "pool" / "vime" / "queue.json"
    listed = json.loads(path.read_bytes())
    closed = [segment for segment in listed["segments"] if segment["summary"] is not None]
    for segment in closed:
        segment["summary"]["num_accepted"] += 1
    path.write_text(json.dumps(listed))
    assert len(audit_run(run).lost) == len(closed)


def test_a_group_that_two_segments_hold_is_told(run: Path) -> None:
    path = run / "rollout_data" / "pool" / "vime" / "queue.json"
    listed = json.loads(path.read_bytes())
    listed["segments"].insert(0, listed["segments"][0])
    path.write_text(json.dumps(listed))
    assert any("submitted twice" in lost for lost in audit_run(run).lost)


def test_a_folder_without_a_queue_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoRunError, match="holds no run with a queue"):
        audit_run(tmp_path)


@pytest.mark.parametrize("version", [3, 5])
def test_a_queue_of_another_schema_is_refused_as_everywhere(run: Path, version: int) -> None:
    path = run / "rollout_data" / "pool" / "vime" / "queue.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": version}))
    with pytest.raises(SchemaVersionError, match=f"has schema version {version}, this code reads 4") as audited:
        audit_run(run)
    with pytest.raises(SchemaVersionError) as looked:
        QueueView(path.parents[1])
    assert str(audited.value) == str(looked.value)
