"""`vime queue` on stopped and live runs, against the independent audit."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pipeline.run_folder import RunFolder
from pipeline.session_lock import session_lock
from recovery import queue_report
from recovery.audit import audit_run
from recovery.claim import queue_claim_path, read_claim, run_claim_path
from recovery.run_location import locate_run
from storage import segment_list
from storage.pool import Pool
from storage.queue import GroupQueue
from tests.pipeline.mini_stream import MiniStream, run_session
from tests.storage.test_queue_view import snapshot
from tests.support.eventful_run import copy_run, make_run
from vime.cli import queue_tables
from vime.cli.look import show
from vime.cli.main import main

READING = (
    "queue status", "queue tasks", "queue tasks --closed", "queue leases", "queue dead", "queue dead --traces",
    "queue versions --closed", "queue history", "sample show 1", "sample show 18", "sample trace 18",
    "sample trace --step 2",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return make_run(tmp_path_factory.mktemp("made") / "run", monkeypatch)


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return copy_run(made, tmp_path / "run")


def call(run: Path, words: str) -> int:
    """`vime GROUP COMMAND RUN REST`."""
    group, command, *rest = words.split()
    return main([group, command, str(run), *rest])


def read_json(run: Path, words: str, capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert call(run, f"{words} --json") == 0
    return json.loads(capsys.readouterr().out)


def test_status_agrees_with_the_audit_of_the_raw_journal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audit = audit_run(run)
    report = read_json(run, "queue status", capsys)
    found = report["identity"]
    assert found == {
        "generated": audit.generated, "trained": audit.trained, "pending": audit.pending,
        "in_flight": audit.in_flight, "dropped": audit.dropped,
    }  # fmt: skip
    assert report["holds"]
    assert (report["num_leased"], found["dropped"]) == (2, {"reward_raised": 1})
    assert (report["newest_commit"], report["rollouts_trained"]) == (1, 3)
    assert (report["coordinator"]["epoch"], report["driver_pid"]) == (2, None)
    assert report["pending_versions"] == [1, 1]
    assert report["dead_letters"] == {"reward_raised": 1}
    assert report["pool_bytes"] > 10_000
    assert report["free_bytes"] <= report["total_bytes"]


def test_status_in_words_shows_the_identity(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(run, "queue status") == 0
    printed = capsys.readouterr().out
    audit = audit_run(run)
    assert (
        f"generated {audit.generated} = trained {audit.trained} + pending {audit.pending} + in flight "
        f"{audit.in_flight} + dropped 1 (1 reward_raised)"
    ) in printed
    assert "epoch 2, 'test'" in printed
    assert "newest commit: of rollout 1" in printed


@pytest.mark.parametrize("words", READING)
@pytest.mark.parametrize("json_too", [False, True])
def test_reading_commands_change_no_byte_and_need_no_lock(
    run: Path, words: str, json_too: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    root = run / "rollout_data" / "pool"
    with (
        session_lock(RunFolder(run, root)),
        Pool.open(root) as pool,
        GroupQueue.open(pool, owner="other", lease_seconds=60),
    ):
        before = snapshot(run)
        assert call(run, words + " --json" * json_too) == 0, capsys.readouterr().err
        assert snapshot(run) == before


def test_tasks_show_state_reason_and_the_line_of_the_prompt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = {task["group_index"]: task for task in read_json(run, "queue tasks", capsys)["tasks"]}
    assert (tasks[0]["state"], tasks[0]["reason"]) == ("dropped", "reward_raised")
    assert tasks[0]["prompt"] == {"row": 0, "epoch": 0, "place": f"{run}/prompts.jsonl:1"}
    assert (tasks[5]["state"], tasks[5]["rewards"], tasks[5]["versions"]) == ("trained", [0.0, 1.0], [1, 1])
    leased = [task for task in tasks.values() if task["state"] == "leased"]
    assert [task["worker"] for task in leased] == ["producer-1"] * 2
    assert call(run, "queue tasks --state dropped") == 0
    assert "dropped (reward_raised)" in capsys.readouterr().out


def test_leases_have_an_age_while_the_coordinator_notes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    (run / "training_log").mkdir(parents=True)
    stream = MiniStream(run)
    try:
        assert len(stream.coordinator.lease("producer-1", 2).work) == 2
        found = read_json(run, "queue leases", capsys)["leases"]
        assert [(row["group_index"], row["worker"], row["attempt"]) for row in found] == [
            (0, "producer-1", 1),
            (1, "producer-1", 1),
        ]
        assert all(0 <= row["heartbeat_age_s"] <= row["age_s"] < 60 for row in found)
        assert 0 <= read_json(run, "queue status", capsys)["oldest_lease_s"] < 60
        assert call(run, "queue leases") == 0
        printed = capsys.readouterr().out
        assert "producer-1" in printed
        assert "stale" not in printed
    finally:
        stream.close()


def test_status_says_of_a_coordinator_that_ended_when_it_began(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (epoch,) = (run / "rollout_data" / "pool" / "vime" / "epochs").glob("*.json")
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait(timeout=60)
    epoch.write_text(json.dumps({**json.loads(epoch.read_text()), "pid": child.pid}))
    assert call(run, "queue status") == 0
    assert re.search(r"ended; it began \d{4}-\d\d-\d\d [\d:]+ \(.* ago\)", capsys.readouterr().out)


def test_a_queue_without_a_session_says_that_nothing_is_trained(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = msgspec.structs.replace(queue_report.status(locate_run(run)), branch=None, rollouts_trained=0)
    show(queue_tables.status(report))
    assert "nothing: no session has begun a branch; newest commit: of rollout 1" in capsys.readouterr().out


def test_versions_explain_their_columns(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(run, "queue versions") == 0
    assert "planned rollouts: batches planned while the version was the newest" in capsys.readouterr().out


def test_leases_of_a_coordinator_that_ended_are_called_stale(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (epoch,) = (run / "rollout_data" / "pool" / "vime" / "epochs").glob("*.json")
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait(timeout=60)
    epoch.write_text(json.dumps({**json.loads(epoch.read_text()), "pid": child.pid}))
    assert call(run, "queue leases") == 0
    assert "these leases are stale" in capsys.readouterr().out


def test_the_limit_says_how_much_it_hides(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(run, "queue tasks --state trained --limit 2") == 0
    assert "2 of 12 groups; --limit shows more." in capsys.readouterr().out


def test_dead_lists_reasons_messages_traces_and_what_became_of_the_group(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(run, "queue dead --traces") == 0
    printed = capsys.readouterr().out
    assert "reward_raised               1        1" in printed
    assert "group 0 (dropped), samples 1, attempt 1, producer" in printed
    assert "KeyError: 'no such environment'" in printed
    assert call(run, "queue dead --reason engine") == 0
    assert "no such environment" not in capsys.readouterr().out


def test_dead_letters_are_exported_with_the_whole_sample(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "dead.jsonl"
    assert call(run, f"queue dead --export {target}") == 0
    assert f"Wrote 1 letters to {target}." in capsys.readouterr().out
    (line,) = target.read_text().splitlines()
    letter = json.loads(line)["letter"]
    assert (letter["reason"], letter["sample_indices"]) == ("reward_raised", [1])
    assert letter["samples"][0]["tokens"] == [1, 2, 3]
    assert call(run, f"queue dead --export {target}") == 1
    assert "File exists" in capsys.readouterr().err


def test_letters_of_a_run_whose_queue_was_in_memory_are_shown_alone(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "rollout_data")
    (run / "settings.json").write_text('{"queue": {"rollout_data_transport": "object-store"}}')
    (dead,) = read_json(run, "queue dead", capsys)["letters"]
    assert (dead["letter"]["reason"], dead["state"]) == ("reward_raised", "unknown")
    assert call(run, "queue status") == 1
    assert "was in memory (--rollout-data-transport object-store)" in capsys.readouterr().err


def test_versions_count_what_each_made(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (version,) = read_json(run, "queue versions --closed", capsys)["versions"]
    audit = audit_run(run)
    assert version["version"] == 1
    assert (version["num_pending"], version["num_trained"]) == (audit.pending, audit.trained)
    assert version["rollouts"] == [0, 1, 2]


def test_history_tells_what_was_rolled_back(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = read_json(run, "queue history", capsys)["branches"]
    assert (first["rollouts"], first["commits"], first["num_groups_rolled_back"]) == ([0, 2], [1], 4)
    assert (second["parent_branch"], second["parent_rollout"]) == (first["branch"], 1)
    assert second["rollouts"] == [2, 2]
    assert call(run, "queue history") == 0
    assert "committed rollouts" in capsys.readouterr().out.splitlines()[0]
    assert audit_run(run).rolled_back == 4


def test_a_live_run_shows_a_true_identity_at_every_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    trained = []

    def look(point: str) -> None:
        report = read_json(run, "queue status", capsys)
        assert report["holds"], (point, report)
        assert report["coordinator"]["alive"] is True
        trained.append(report["identity"]["trained"])
        assert call(run, "queue tasks --closed") == 0

    run_session(run, look)
    assert trained == sorted(trained)
    assert (trained[0], trained[-1]) == (0, 24)


def test_requeued_groups_are_generated_again_and_no_prompt_is_skipped(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_json(run, "queue status", capsys)
    new = before["identity"]["generated"] + before["num_fresh"]
    assert call(run, "queue requeue --all --yes") == 0
    assert f"Group 0 is requeued as group {new}." in capsys.readouterr().out
    after = read_json(run, "queue status", capsys)
    assert after["holds"]
    assert after["num_fresh"] == before["num_fresh"] + 1
    assert call(run, "queue requeue 0 --yes") == 1
    assert f"Group 0 was requeued before, as group {new}" in capsys.readouterr().err
    run_session(run)
    audit = audit_run(run)
    assert (audit.lost, audit.trained_twice, audit.identity_holds) == ([], [], True)
    (task,) = read_json(run, f"queue tasks --group {new}", capsys)["tasks"]
    assert (task["requeued_from"], task["prompt"]["place"]) == (0, f"{run}/prompts.jsonl:1")
    (dead,) = read_json(run, "queue dead", capsys)["letters"]
    assert (dead["state"], dead["requeued_as"]) == ("dropped", new)


def test_a_group_dropped_by_hand_is_counted_has_a_letter_and_is_never_generated(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = read_json(run, "queue tasks --state leased", capsys)["tasks"][0]["group_index"]
    assert call(run, f"queue drop {waiting} --reason bad_prompt --yes") == 0
    report = read_json(run, "queue status", capsys)
    assert report["identity"]["dropped"] == {"reward_raised": 1, "bad_prompt": 1}
    assert report["holds"]
    assert read_json(run, f"queue dead --group {waiting}", capsys)["letters"][0]["letter"]["reason"] == "bad_prompt"
    run_session(run)
    assert read_json(run, f"queue tasks --group {waiting}", capsys)["tasks"][0]["state"] == "dropped"
    assert audit_run(run).lost == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("queue requeue 5 --yes", "Group 5 is accepted; only dropped groups can be requeued."),
        ("queue requeue 99 --yes", "Group 99 is not submitted"),
        ("queue requeue --yes", "Name the groups to requeue, or give --all"),
        ("queue drop 5 --reason x --yes", "Group 5 is accepted; only groups that wait"),
        ("queue drop 0 --reason x --yes", "Group 0 is dropped; only groups that wait"),
        ("queue requeue 0", "Nobody can be asked"),
        ("sample show 999", "There is no sample 999"),
        ("sample show -1", "There is no sample -1"),
        ("sample trace 999", "There is no sample 999"),
        ("sample trace --step 9", "No rank has logged rollout 9."),
        ("sample trace", "Give the index of a sample, or --step"),
        ("queue nothing", "unknown command 'nothing'"),
        ("sample nothing", "unknown command 'nothing'"),
    ],
)
def test_what_cannot_be_done_is_told_and_changes_nothing(
    run: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(run)
    assert call(run, words) == 1
    assert message in capsys.readouterr().err
    assert snapshot(run) == before


@pytest.mark.parametrize(
    "words",
    [
        "queue requeue 0 --yes", "queue requeue --all --yes", "queue requeue 5 --yes", "queue requeue 0",
        "queue drop 23 --reason x --yes", "queue drop 5 --reason x --yes",
    ],
)  # fmt: skip
@pytest.mark.parametrize("holder", ["session", "coordinator"])
def test_the_queue_of_a_live_run_is_not_changed(
    run: Path, words: str, holder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = run / "rollout_data" / "pool"
    with Pool.open(root) as pool:
        lock = (
            session_lock(RunFolder(run, root))
            if holder == "session"
            else GroupQueue.open(pool, owner="coordinator of a run", lease_seconds=60)
        )
        with lock:
            before = snapshot(run)
            assert call(run, words) == 1
            assert snapshot(run) == before
        printed = capsys.readouterr().err
    assert "The run is live, and its queue can't be changed" in printed
    assert f"process {os.getpid()}" in printed
    assert "Stop it with one Ctrl-C" in printed
    assert read_json(run, "queue status", capsys)["identity"]["dropped"] == {"reward_raised": 1}


@pytest.mark.parametrize(
    ("words", "command"),
    [("queue drop runs/a 3", "queue drop"), ("audit", "audit"), ("replay runs/a --rollout x", "replay")],
)
def test_words_that_a_command_does_not_take_lead_to_its_help(
    words: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 1
    assert capsys.readouterr().err.endswith(f"      Next: `vime {command} --help` lists what it takes.\n")


def test_an_answer_of_no_changes_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert call(run, "queue requeue 0") == 1
    assert "Nothing was changed." in capsys.readouterr().err
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert call(run, "queue requeue 0") == 0


@pytest.mark.parametrize("words", ["queue status", "queue tasks", "queue requeue --all --yes", "sample trace 1"])
def test_a_folder_that_is_no_run_is_told(tmp_path: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(tmp_path, words) == 1
    assert f"{tmp_path} holds no run with a queue" in capsys.readouterr().err
    assert call(tmp_path / "missing", words) == 1
    assert "is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [f"queue {name}" for name in ("status", "tasks", "leases", "dead", "versions", "history", "requeue", "drop")]
    + ["sample show", "sample trace"],
)
def test_help_has_examples_and_the_exit_statuses(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words.split(), "--help"]) == 0
    printed = capsys.readouterr().out
    assert f"  vime {words} runs/a" in printed
    assert "exit status:" in printed


def test_a_sample_is_shown_with_the_version_of_each_token(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    view = read_json(run, "sample show 19", capsys)
    assert (view["group_index"], view["member"], view["state"], view["reward"]) == (9, 1, "trained", 1.0)
    assert view["place"]["place"] == f"{run}/prompts.jsonl:10"
    prompt, *response = view["tokens"]
    assert (prompt["version"], prompt["log_prob"], prompt["trained"]) == (None, None, False)
    assert [(token["token_id"], token["version"], token["log_prob"]) for token in response] == [
        (2, 1, -0.5),
        (3, 1, -0.25),
    ]


def test_a_sample_is_shown_with_what_the_trainer_made_of_each_token(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view = read_json(run, "sample show 19", capsys)
    prompt, *response = view["tokens"]
    assert (prompt["trainer_log_prob"], prompt["gap"], prompt["advantage"]) == (None, None, None)
    assert [(token["trainer_log_prob"], token["gap"], token["advantage"]) for token in response] == [
        (-0.75, -0.25, 0.5),
        (-0.125, 0.125, -1.5),
    ]
    assert (view["training"]["rollout_id"], view["training"]["counts"], view["mean_gap"]) == (2, True, 0.1875)
    assert call(run, "sample show 19") == 0
    printed = capsys.readouterr().out
    assert "rollout 2, step 0, rank 0: mean gap 0.1875 nats a token" in printed
    assert "-0.5000  -0.2500     0.5000        1  yes" in printed


def test_a_failed_sample_is_shown_from_its_letter(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(run, "sample show 1") == 0
    printed = capsys.readouterr().out
    assert "(reward_raised)" in printed
    assert "of group 0 (dropped)" in printed


def test_a_trace_goes_from_the_prompts_line_to_the_steps_that_count_and_those_that_do_not(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = read_json(run, "sample trace 2", capsys)
    assert trace["prompt"]["place"] == f"{run}/prompts.jsonl:2"
    assert [event["what"] for event in trace["history"]] == ["submitted", "leased", "accepted"]
    (step,) = trace["trained"]
    assert (step["rollout_id"], step["counts"], trace["committed_by"]) == (0, True, 1)
    (planned,) = trace["planned"]
    assert (planned["rollout_id"], planned["rank"], planned["age_versions"]) == (0, 0, 0)
    undone = read_json(run, "sample trace 18", capsys)
    assert [step["counts"] for step in undone["trained"]] == [False, True]
    assert undone["committed_by"] is None


def test_a_step_leads_back_to_its_samples_and_their_lines(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = read_json(run, "sample trace --step 2.0", capsys)
    logged = [
        line
        for line in map(json.loads, (run / "training_log" / "rank_0.jsonl").read_text().splitlines())
        if line["rollout_id"] == 2
    ]
    assert [sample["sample_index"] for sample in samples] == logged[-1]["sample_indices"]
    assert {sample["branch"] for sample in samples} == {logged[-1]["branch"]}
    for sample in samples:
        trace = read_json(run, f"sample trace {sample['sample_index']}", capsys)
        assert trace["prompt"] == sample["prompt"]
    rolled_back = read_json(run, f"sample trace --step 2 --branch {logged[0]['branch']}", capsys)
    assert {sample["counts"] for sample in rolled_back} == {False}


def test_tokens_are_shown_as_text_where_the_tokenizer_is_at_hand(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return f"<{ids[0]}>"

    class Loader:
        @staticmethod
        def from_pretrained(folder: Path, *, local_files_only: bool) -> Tokenizer:
            assert (folder, local_files_only) == (run, True)
            return Tokenizer()

    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=Loader))
    assert call(run, f"sample show 18 --tokenizer {run}") == 0
    assert '"<2>"' in capsys.readouterr().out


def test_a_moved_run_is_found_by_its_folder_or_by_its_pool(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_json(run, "queue status", capsys)["identity"]
    moved = run.rename(tmp_path / "moved")
    assert read_json(moved, "queue status", capsys)["identity"] == before
    pool = (moved / "rollout_data" / "pool").rename(tmp_path / "elsewhere")
    assert call(moved, "queue status") == 1
    assert read_json(moved, f"queue status --pool {pool}", capsys)["identity"] == before


@pytest.mark.parametrize("ckpt_step", [None, 1])
def test_a_run_whose_storage_was_reclaimed_shows_what_is_left_and_the_same_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ckpt_step: int | None
) -> None:
    monkeypatch.setattr(segment_list, "MAX_SEGMENT_GROUPS", 4)
    run = tmp_path / "run"
    run_session(run, rollouts=12, online_gc=True)
    if ckpt_step is not None:
        MiniStream(run, ckpt_step=7, rollouts=12, online_gc=True).close()
    report, audit = read_json(run, "queue status", capsys), audit_run(run)
    found = report["identity"]
    assert report["holds"]
    assert (found["trained"], found["pending"], found["in_flight"]) == (audit.trained, audit.pending, audit.in_flight)
    assert sum(found["dropped"].values()) == sum(audit.dropped.values())
    for words in ("queue tasks --closed", "queue versions --closed", "queue history", "sample trace --step 11"):
        assert call(run, words) == (0 if ckpt_step is None or "--step" not in words else 1), words
    assert call(run, "sample trace 0") == 1
    assert "whose part of the queue was reclaimed" in capsys.readouterr().err


def test_groups_of_another_branch_whose_samples_are_gone_are_called_reclaimed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run_session(run, online_gc=True)
    MiniStream(run, ckpt_step=1, online_gc=True).close()
    audit = audit_run(run)
    states = Counter(task["state"] for task in read_json(run, "queue tasks", capsys)["tasks"])
    assert states["reclaimed"] == audit.dropped["reclaimed"] > 0
    assert (states["pending"], states["trained"]) == (audit.pending, audit.trained)
    assert read_json(run, "queue status", capsys)["identity"]["dropped"] == audit.dropped


@pytest.mark.parametrize("inside", ["rollout_data/pool", "data/pool"])
def test_a_copied_run_is_changed_and_read_in_its_own_queue(
    run: Path, tmp_path: Path, inside: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rename_pool(run, run / inside)
    copy = copy_run(run, tmp_path / "copy")
    before = snapshot(run)
    assert call(copy, "queue drop 23 --reason by_hand --yes") == 0
    assert call(copy, "queue requeue 0 --yes") == 0
    assert snapshot(run) == before
    report = read_json(copy, "queue status", capsys)
    assert report["pool"] == str(copy / inside)
    assert report["identity"]["dropped"] == audit_run(copy).dropped == {"by_hand": 1, "reward_raised": 1}
    shutil.rmtree(copy / inside)
    assert call(copy, "queue status") == 1


@pytest.mark.parametrize("words", ["queue drop 23 --reason x --yes", "queue requeue 0 --yes"])
def test_a_queue_that_is_not_bound_to_the_run_is_not_changed(
    run: Path, tmp_path: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rename_pool(run, tmp_path / "elsewhere" / "pool")
    copy = copy_run(run, tmp_path / "copy")
    before = snapshot(tmp_path / "elsewhere")
    assert call(copy, words) == 1
    assert f"is a copy of the run in {run}" in capsys.readouterr().err
    (copy / "rollout" / "queue.json").unlink()
    assert call(copy, f"{words} --pool {tmp_path / 'elsewhere' / 'pool'}") == 1
    assert f"belongs to the run in {run}, not to the one in {copy}" in capsys.readouterr().err
    assert snapshot(tmp_path / "elsewhere") == before
    assert call(run, words) == 0


def rename_pool(run: Path, target: Path) -> None:
    """Make `run` one that was started with its pool in `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    (run / "rollout_data" / "pool").rename(target)
    claimed = read_claim(run_claim_path(run))
    assert claimed is not None
    claim = msgspec.structs.replace(claimed, run=str(run), queue=str(target))
    for path in (run_claim_path(run), queue_claim_path(target)):
        path.write_bytes(msgspec.json.encode(claim))
