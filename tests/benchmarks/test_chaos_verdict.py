"""What a campaign's checks are there for, each done to a sound run: they find it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from straw.backend import FilesystemBackend
from straw.journal import Journal

from benchmarks.chaos.processes import MARK_VARIABLE, MarkedProcesses
from benchmarks.chaos.verdict import Verdict, accepted_groups, judge
from tests.support.eventful_run import copy_run, make_run

PROMPTS = [f"p{number}" for number in range(30)]
Event = dict[str, Any]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        run = make_run(tmp_path_factory.mktemp("sound") / "run", patch)
    steps = [{"rollout_id": number, "policy_version": number + 1} for number in range(4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return run


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    return copy_run(sound, tmp_path / "run")


def rewrite_journals(run: Path, change: Callable[[Event], list[Event]]) -> None:
    """Write what `change` makes of each event in its place."""
    for path in (run / "rollout_data" / "pool" / "queues").glob("*/run.json"):
        backend, identity = FilesystemBackend(path.parent), json.loads(path.read_bytes())
        journal = Journal(backend, identity, recover=True, read_only=True)
        transactions = list(journal.transactions)
        journal.close()
        (path.parent / "control" / "journal.log").unlink()
        journal = Journal(backend, identity)
        for transaction in transactions:
            events = [changed for event in transaction if event["type"] != "Run" for changed in change(event)]
            if events:
                journal.append(events)
        journal.close()


def is_acceptance(event: Event) -> bool:
    return event["type"] == "Yielded" and (event.get("metadata") or {}).get("position") is not None


def trained_groups(run: Path) -> list[str]:
    """As the log of the only rank has them."""
    lines = (run / "training_log" / "rank_0.jsonl").read_text().splitlines()
    return [f"prompt:{group}" for line in lines for group in json.loads(line)["group_indices"]]


def verdict_on(run: Path) -> Verdict:
    return judge(run, set(), PROMPTS)


def test_a_sound_run_and_its_rewritten_journals_show_nothing(run: Path) -> None:
    assert verdict_on(run) == Verdict()
    rewrite_journals(run, lambda event: [event])
    assert verdict_on(run) == Verdict()


def test_an_accepted_group_that_the_journal_no_longer_has_is_lost(run: Path) -> None:
    dropped = trained_groups(run)[0]
    rewrite_journals(run, lambda event: [] if is_acceptance(event) and event["task_id"] == dropped else [event])
    assert any(line.startswith((dropped, f"group {dropped[7:]}")) for line in verdict_on(run).lost)


def test_an_accepted_group_that_the_last_session_passed_over_is_lost(run: Path) -> None:
    owed = accepted_groups(run)
    forgotten = owed - set(trained_groups(run))
    assert forgotten
    expected = [f"{task}: accepted, and passed over for good" for task in sorted(forgotten)]
    assert judge(run, owed, PROMPTS).lost == expected


def test_a_group_that_was_accepted_twice_is_told(run: Path) -> None:
    twice = trained_groups(run)[0]

    def accept_again(event: Event) -> list[Event]:
        return [event, event] if is_acceptance(event) and event["task_id"] == twice else [event]

    rewrite_journals(run, accept_again)
    assert f"{twice}: accepted twice" in verdict_on(run).lost


def test_a_prompt_that_was_never_submitted_is_skipped(run: Path) -> None:
    def skip(event: Event) -> list[Event]:
        if event["type"] != "Submitted":
            return [event]
        return [{**event, "tasks": [task for task in event["tasks"] if task["task_id"] != "prompt:1"]}]

    rewrite_journals(run, skip)
    assert "prompt:1: never submitted" in verdict_on(run).skipped_prompts


def test_a_prompt_that_the_source_left_out_is_skipped_though_groups_are_numbered_on(run: Path) -> None:
    skipped = judge(run, set(), PROMPTS[1:]).skipped_prompts
    assert "prompt:1: made from another prompt than 'p2'" in skipped


def test_a_version_that_was_set_back_is_a_regression(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"rollout_id": 4, "policy_version": 3}\n')
    assert verdict_on(run).version_regressions == ["rollout 4: version 3 after 4"]


def test_a_process_that_outlives_its_session_is_found_whatever_its_parent_and_title(tmp_path: Path) -> None:
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '100'], start_new_session=True, stdout=subprocess.DEVNULL).pid)"
    environment = {**os.environ, MARK_VARIABLE: str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    processes = MarkedProcesses(str(tmp_path))
    assert processes.end() == [f"{done.stdout.strip()} sleep 100"]
    assert processes.alive() == []
