"""`vime doctor`: lines, JSON, and exit status."""

import json
from pathlib import Path

import pytest

from pipeline.fixed_settings import fixed_settings
from pipeline.prompt_source import build_prompt_source
from pipeline.run_folder import RunFolder
from recovery.fixed import hold_to_fixed
from tests.pipeline.doctor.test_job_checks import Letters
from tests.pipeline.doctor.test_machine_checks import SOUND
from tests.pipeline.preview.planned import QWEN3_4B, write_job
from vime.cli import doctor as doctor_module
from vime.cli.main import main
from vime.settings.parse import parse_settings


@pytest.fixture(autouse=True)
def sound_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "gather", lambda: SOUND)


def test_without_flags_only_the_machine_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "pass  packages" in out
    assert "leftover" not in out
    assert out.rstrip().endswith("8 passed, 0 warnings, 0 failed.")


def test_failed_check_shows_its_next_step_and_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--save", str(tmp_path), "--actor-num-gpus-per-node", "9"]) == 2
    lines = capsys.readouterr().out.splitlines()
    (number,) = [number for number, line in enumerate(lines) if line.startswith("fail  devices of the run")]
    assert lines[number + 1].strip() == "Next: Lower --actor-num-gpus-per-node or --rollout-num-gpus."
    assert lines[-1].endswith("1 failed.")


def test_json_has_every_check_and_the_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write_job(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("{")
    assert main(["doctor", "--json", *words]) == 2
    record = json.loads(capsys.readouterr().out)
    by_name = {check["name"]: check for check in record["checks"]}
    assert by_name["prompts"]["outcome"] == "fail"
    assert "prompts.jsonl:1" in by_name["prompts"]["found"]
    assert by_name["prompts"]["next_step"]
    assert record["pass"] + record["warn"] + record["fail"] == len(record["checks"])


def test_juicefs_profile_without_a_mount_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    declaration = tmp_path / "declaration.json"
    declaration.write_text("{}")
    main([
        "doctor", "--save", str(tmp_path), "--rollout-storage-profile", "juicefs",
        "--rollout-storage-declaration", str(declaration),
    ])  # fmt: skip
    assert "not on fuse.juicefs" in capsys.readouterr().out


def test_cluster_that_is_not_there_cannot_be_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--assume-gpus", "16"]) == 1
    assert "vime train --dry-run --assume-gpus N" in capsys.readouterr().err


def test_help_names_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0
    assert "with 2 otherwise" in capsys.readouterr().out


def test_storage_alone_is_checked_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--storage", str(tmp_path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in record["checks"]] == ["storage"]
    assert f"{tmp_path}: writable, fsync" in record["checks"][0]["found"]


def test_storage_that_does_not_exist_fails_though_its_parent_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "not" / "there"
    assert main(["doctor", "--storage", str(folder), "--peer", str(tmp_path)]) == 2
    printed = capsys.readouterr().out
    assert f"{folder} does not exist (its nearest ancestor that does is {tmp_path})" in printed
    assert "Next: Mount it, or make it" in printed
    assert "other client" not in printed
    file = tmp_path / "file"
    file.write_text("")
    assert main(["doctor", "--storage", str(file)]) == 2
    assert f"{file} is a file, not a folder." in capsys.readouterr().out


def test_peer_that_is_the_same_mount_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--storage", str(tmp_path), "--peer", str(tmp_path)]) == 2
    assert "is on the same mount" in capsys.readouterr().out


def test_declared_mount_that_is_none_fails_and_no_peer_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    declaration = tmp_path / "declaration.json"
    declaration.write_text("{}")
    words = ["--storage", str(tmp_path), "--peer", str(tmp_path), "--rollout-storage-declaration", str(declaration)]
    assert main(["doctor", *words]) == 2
    out = capsys.readouterr().out
    assert "not on fuse.juicefs" in out
    assert "other client" not in out


def test_peer_without_a_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--peer", "/mnt"]) == 1
    assert "--peer goes with --storage only" in capsys.readouterr().err


def test_run_that_was_started_otherwise_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write_job(tmp_path)[2:]  # without --hf-checkpoint no tokenizer is loaded
    settings = parse_settings(words)
    RunFolder.of(settings).make()
    hold_to_fixed(tmp_path / "run", fixed_settings(settings, build_prompt_source(settings)))
    main(["doctor", *words])
    assert "pass  run in --save" in capsys.readouterr().out
    assert main(["doctor", *words, "--rollout-seed", "7"]) == 2
    assert "--rollout-seed is 7, was 42" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        ("--storge /x", "--storge is not a flag; the nearest one is --storage"),
        ("--storage /tmp --per /x", "--per is not a flag; the nearest one is --peer"),
        ("--tensor-model-parallel-sise 2", "The nearest one is --tensor-model-parallel-size"),
    ],
)
def test_misspelt_flag_is_refused_with_the_nearest(
    words: str, nearest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "vime.backends.megatron_utils.arguments.known_megatron_flags",
        lambda: frozenset({"--tensor-model-parallel-size"}),
    )
    assert main(["doctor", *words.split()]) == 1
    assert nearest in capsys.readouterr().err


def test_flags_of_a_job_are_refused_where_a_folder_alone_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--storage", str(tmp_path), "--lr", "3"]) == 1
    assert "--lr has no effect with --storage" in capsys.readouterr().err


def test_devices_that_no_flag_asks_for_are_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--lr", "3"]) == 0
    assert "devices of the run" not in capsys.readouterr().out


def test_prompt_longer_than_the_model_allows_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: Letters())
    words = write_job(tmp_path, {**QWEN3_4B, "max_position_embeddings": 10})
    assert main(["doctor", *words]) == 2
    assert "Row 0: the prompt has 10 tokens, prompt and response together may have 10" in capsys.readouterr().out
