"""What the run folder says of engines that get no requests, and of the end of a session."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pipeline.incidents import Incident, IncidentLog, open_incidents, session_incidents
from storage.json_lines import read_json_lines
from vime.errors import RunFailedError

NAMES = {"http://one": "engine 0"}


def still_open(path: Path) -> list[tuple[str, str]]:
    found = open_incidents(read_json_lines(path, Incident, "an incident"))
    return [(incident.kind, incident.text) for incident in found]


def test_an_engine_without_requests_is_named_with_its_log_until_it_serves_again(tmp_path: Path) -> None:
    path, times = tmp_path / "incidents.jsonl", iter(range(9))
    log = IncidentLog(path, clock=lambda: float(next(times)))
    log.engines("actor", {"http://one": "its process ended."}, NAMES)
    log.engines("actor", {"http://one": "its process ended.", "http://other": "it hangs."}, NAMES)
    assert still_open(path) == [
        ("engine", "Engine 0 (http://one) gets no requests: its process ended."),
        ("engine", "The engine at http://other gets no requests: it hangs."),
    ]
    lines = read_json_lines(path, Incident, "an incident")
    assert "logs/engine_0.log" in lines[0].what_to_do
    assert [line.time_s for line in lines] == [0.0, 1.0], "nothing is said twice"
    log.engines("actor", {"http://other": "it does not answer."}, NAMES)
    assert still_open(path) == [("engine", "The engine at http://other gets no requests: it does not answer.")]
    log.engines("actor", {}, NAMES)
    assert still_open(path) == []


def test_engines_of_several_models_are_out_and_back_by_themselves(tmp_path: Path) -> None:
    path = tmp_path / "incidents.jsonl"
    log = IncidentLog(path)
    log.engines("actor", {"http://one": "it hangs."}, {})
    log.engines("judge", {"http://two": "its process ended."}, {})
    log.engines("actor", {}, {})
    assert still_open(path) == [("engine", "The engine at http://two gets no requests: its process ended.")]
    log.engines("judge", {}, {})
    assert still_open(path) == []


def test_what_ended_a_session_stands_until_the_next_one_begins(tmp_path: Path) -> None:
    path = tmp_path / "incidents.jsonl"

    def fail() -> None:
        with session_incidents(path) as log:
            assert not path.exists(), "a run without incidents has no such file"
            log.engines("actor", {"http://one": "its process ended."}, NAMES)
            raise RunFailedError("engine_0 ended unexpectedly.", next_step="Run the same command again.")

    with pytest.raises(RunFailedError):
        fail()
    assert [kind for kind, _ in still_open(path)] == ["engine", "ended"]
    assert still_open(path)[1][1] == "engine_0 ended unexpectedly."
    with session_incidents(path):
        assert still_open(path) == []


def test_a_line_that_can_not_be_written_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        IncidentLog(tmp_path / "none" / "incidents.jsonl").engines("actor", {"http://one": "gone."}, {})
    assert "an incident was not kept" in caplog.text
