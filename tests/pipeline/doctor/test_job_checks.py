"""Checks of a job's settings against a machine: each fault fails with its own next step."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.doctor.check import Outcome
from pipeline.doctor.job import devices, free_disk, job_checks, kept_engines, leftovers, router_port
from pipeline.doctor.tokenizer import round_trip
from pipeline.preview.disk_need import disk_need
from pipeline.run_folder import RunFolder
from tests.pipeline.doctor.test_machine_checks import SOUND
from tests.pipeline.preview.planned import QWEN3_4B, settings_of
from vime.backends.vllm_utils.lease import Claim, KeptProcess, claim_path, here, write_claim, write_process
from vime.backends.vllm_utils.supervisor import start_time
from vime.data.cursor import PromptTask
from vime.settings.parse import parse_settings

GIB = 2**30


def test_job_that_fits_passes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B | {"hidden_size": 8, "vocab_size": 8}))
    tiny = settings_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B | {"hidden_size": 8, "vocab_size": 8}))
    checks = job_checks(tiny, SOUND)
    assert {check.name: check.outcome for check in checks if check.outcome is not Outcome.PASS} == {}
    assert {"devices of the run", "model", "free disk for --save", "storage of --save", "leftover processes"} <= {
        check.name for check in checks
    }


def test_without_flags_nothing_of_a_job_is_read() -> None:
    assert [check.name for check in job_checks(parse_settings([]), SOUND)] == ["devices of the run"]


def test_too_few_devices(tmp_path: Path) -> None:
    found = devices(settings_of(tmp_path, "--actor-num-gpus-per-node", "8"), replace(SOUND, num_gpus=4))
    assert found.outcome is Outcome.FAIL
    assert "9 GPUs needed (8 trainer ranks, 1 engine, separate), 4 there" in found.found
    assert "--actor-num-gpus-per-node" in found.next_step


def test_unreadable_model_fails(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    (tmp_path / "config.json").unlink()
    (model,) = [check for check in job_checks(settings, SOUND) if check.name == "model"]
    assert model.outcome is Outcome.FAIL
    assert "does not exist" in model.found
    assert "--hf-checkpoint" in model.next_step


@pytest.mark.parametrize(
    ("free_gib", "outcome"), [(10, Outcome.FAIL), (60, Outcome.WARN), (1000, Outcome.PASS)]
)  # fmt: skip
def test_free_disk_against_one_commit_and_the_whole_run(tmp_path: Path, free_gib: int, outcome: Outcome) -> None:
    found = free_disk("--save", tmp_path, free_gib * GIB, disk_need(settings_of(tmp_path), QWEN3_4B))
    assert found.outcome is outcome
    assert f"{free_gib}.0 GiB free" in found.found
    assert bool(found.next_step) is (outcome is not Outcome.PASS)


@pytest.mark.parametrize(("reserve", "outcome"), [("1e9", Outcome.FAIL), ("1e-6", Outcome.PASS)])
def test_free_disk_against_the_reserve(tmp_path: Path, reserve: str, outcome: Outcome) -> None:
    settings = settings_of(tmp_path, "--rollout-disk-reserve-gib", reserve)
    (found,) = [check for check in job_checks(settings, SOUND) if check.name == "disk reserve"]
    assert found.outcome is outcome
    if outcome is Outcome.FAIL:
        assert "1000000000.00 GiB are needed (--rollout-disk-reserve-gib)" in found.found
        assert "--rollout-disk-reserve-gib" in found.next_step


def test_folder_that_cannot_be_written_fails(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "--rollout-data-dir", "/proc/vime")
    (storage,) = [check for check in job_checks(settings, SOUND) if check.name == "storage of --rollout-data-dir"]
    assert storage.outcome is Outcome.FAIL
    assert "/proc: writable" in storage.found
    assert "--rollout-data-dir" in storage.next_step


def test_a_folder_that_the_run_will_make_says_which_parent_was_tested(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "later"
    settings = settings_of(tmp_path, "--rollout-data-dir", str(folder))
    (storage,) = [check for check in job_checks(settings, SOUND) if check.name == "storage of --rollout-data-dir"]
    assert storage.outcome is Outcome.PASS
    assert f"{folder} does not exist yet; tested its parent {tmp_path}:" in storage.found


def test_a_file_where_the_folder_should_be_fails(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for named in (file, file / "inside"):
        settings = settings_of(tmp_path, "--rollout-data-dir", str(named))
        (storage,) = [check for check in job_checks(settings, SOUND) if check.name == "storage of --rollout-data-dir"]
        assert (storage.outcome, storage.found) == (Outcome.FAIL, f"{file} is a file, not a folder.")


def test_taken_router_port(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "--vllm-router-port", "4000")
    (taken,) = router_port(settings, lambda *_: "Address already in use")
    (free,) = router_port(settings, lambda *_: None)
    assert (taken.outcome, free.outcome) == (Outcome.FAIL, Outcome.PASS)
    assert "4000: Address already in use" in taken.found
    assert router_port(settings_of(tmp_path, "--vllm-router-port", "4000", "--vllm-router-ip", "h")) == []


def test_process_of_a_previous_session_is_named_until_it_ends(tmp_path: Path) -> None:
    folder = RunFolder.of(settings_of(tmp_path))
    folder.make()
    assert leftovers(folder).outcome is Outcome.PASS
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        time.sleep(0.1)
        folder.processes.write_text(json.dumps({"driver": 2**22 + 1, "engines": [[process.pid]], "ray_folder": "/x"}))
        found = leftovers(folder)
        assert found.outcome is Outcome.FAIL
        assert f"processes: {process.pid}." in found.found
        assert f"kill {process.pid}" in found.next_step
        process.kill()
        process.wait()
    assert leftovers(folder).outcome is Outcome.PASS


def test_kept_engines_are_told_apart_from_leftovers(tmp_path: Path) -> None:
    folder = RunFolder.of(settings_of(tmp_path))
    folder.make()
    assert kept_engines(folder, settings_of(tmp_path)) == []
    path, pid = claim_path(folder.kept_engines, "engine_0"), os.getpid()
    write_claim(path, Claim("a", "127.0.0.1", 1, here(), 0.0, str(tmp_path / "none"), {"session id": "nightly"}))
    write_process(path, KeptProcess("a", pid, start_time(pid)))
    folder.processes.write_text(json.dumps({"engines": [[pid]]}))
    assert leftovers(folder).outcome is Outcome.PASS
    (wanted,) = kept_engines(folder, settings_of(tmp_path, "--rollout-session-id", "nightly"))
    (unwanted,) = kept_engines(folder, settings_of(tmp_path))
    assert (wanted.outcome, unwanted.outcome) == (Outcome.PASS, Outcome.WARN)
    assert unwanted.next_step == f"Give --rollout-session-id nightly, or kill {pid}."


def test_younger_process_with_an_old_number_is_no_leftover(tmp_path: Path) -> None:
    folder = RunFolder.of(settings_of(tmp_path))
    folder.make()
    folder.processes.write_text(json.dumps({"driver": os.getpid()}))
    os.utime(folder.processes, (1.0, 1.0))
    assert leftovers(folder).outcome is Outcome.PASS


def test_unreadable_record_of_processes_is_a_warning(tmp_path: Path) -> None:
    folder = RunFolder.of(settings_of(tmp_path))
    folder.make()
    folder.processes.write_text("{")
    assert leftovers(folder).outcome is Outcome.WARN


class Letters:
    """One id a letter; `lost` letters have none, `merged` decodes otherwise than it encodes."""

    def __init__(self, lost: str = "", merged: str = "") -> None:
        self.lost, self.merged = lost, merged

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text if letter not in self.lost]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(chr(number) for number in token_ids).replace(self.merged, "") if self.merged else "".join(
            chr(number) for number in token_ids
        )  # fmt: skip

    def apply_chat_template(self, conversation: list[dict[str, Any]], **_: Any) -> str:
        if conversation[0]["role"] != "user":
            raise ValueError("no template")
        return f"<{conversation[0]['content']}>"


def prompt(content: Any) -> PromptTask:
    return PromptTask(
        group_index=0, first_sample_index=0, epoch=0, row=7, prompt=content, label=None, metadata={}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tokenizer", "content", "flags", "outcome", "found", "next_step"),
    [
        (Letters(), "abc", [], "pass", "1 prompt comes back the same", ""),
        (Letters(), [{"role": "user", "content": "abc"}], ["--apply-chat-template"], "pass", "comes back", ""),
        (Letters(lost="b"), "abc", [], "warn", "1 of 1 prompts read otherwise", "every character"),
        (Letters(merged="b"), "abc", [], "fail", "Row 7: 3 ids become 2 others", "belongs to the model"),
        (Letters(lost="abc"), "abc", [], "fail", "has no token", "belongs to the model"),
        (Letters(), [{"role": "user", "content": "abc"}], [], "fail", "The prompt is a chat", "--apply-chat-template"),
        (Letters(), [{"role": "x", "content": "a"}], ["--apply-chat-template"], "fail", "no template", "--apply-chat"),
    ],
)
def test_tokenizer_round_trip(
    tmp_path: Path, tokenizer: Letters, content: Any, flags: list[str], outcome: str, found: str, next_step: str
) -> None:
    check = round_trip(settings_of(tmp_path, *flags), tokenizer, [prompt(content)])
    assert check.outcome.value == outcome
    assert found in check.found
    assert next_step in check.next_step


@pytest.mark.parametrize(("most_tokens", "outcome"), [(3, Outcome.FAIL), (4, Outcome.PASS), (None, Outcome.PASS)])
def test_prompt_that_leaves_no_room_for_a_response_is_named(
    tmp_path: Path, most_tokens: int | None, outcome: Outcome
) -> None:
    check = round_trip(settings_of(tmp_path), Letters(), [prompt("abc")], most_tokens)
    assert check.outcome is outcome
    if outcome is Outcome.FAIL:
        assert "Row 7: the prompt has 3 tokens, prompt and response together may have 3" in check.found
