"""`metrics.jsonl` as the viewer reads it."""

from pathlib import Path

import msgspec

from tests.support.step_records import step_record, write_metrics
from vime.view.metrics import MetricsFile


def test_only_what_was_appended_is_read_and_a_torn_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    assert file.refresh().steps == []
    write_metrics(path, [step_record(0), step_record(1)])
    first = file.refresh()
    assert [step.rollout_id for step in first.steps] == [0, 1]
    line = msgspec.json.encode(step_record(2)) + b"\n"
    before = first.serial
    with path.open("ab") as out:
        out.write(line[:50])
    assert file.refresh().serial == before
    with path.open("ab") as out:
        out.write(line[50:])
    assert [step.rollout_id for step in file.refresh().steps] == [0, 1, 2]


def test_a_resume_takes_back_what_it_trains_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    old, new = [step_record(n) for n in range(5)], [step_record(2, branch="c", reward_mean=0.75)]
    write_metrics(path, [*old, *new])
    found = MetricsFile(path).refresh()
    assert [(step.rollout_id, step.branch) for step in found.steps] == [(0, "b"), (1, "b"), (2, "c")]
    assert found.num_rolled_back == 3


def test_a_line_that_is_no_metrics_is_named_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [step_record(0)])
    with path.open("ab") as out:
        out.write(b'{"rollout_id": 1}\nnot json\n' + msgspec.json.encode(step_record(1)) + b"\n")
    found = MetricsFile(path).refresh()
    assert [step.rollout_id for step in found.steps] == [0, 1]
    assert [problem.split(": ")[0] for problem in found.problems] == [f"{path}:2", f"{path}:3"]


def test_a_loss_that_is_not_finite_is_read_from_its_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [step_record(0, train={"loss": float("nan")})])
    assert b'"loss":null' in path.read_bytes()
    (step,) = MetricsFile(path).refresh().steps
    assert step.train["loss"] != step.train["loss"]


def test_a_file_that_got_shorter_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [step_record(n) for n in range(3)])
    file = MetricsFile(path)
    file.refresh()
    write_metrics(path, [step_record(0, branch="d")])
    assert [step.branch for step in file.refresh().steps] == ["d"]
