"""`vime train --dry-run` on a --save that holds a run, or that nothing can be written to."""

import re
from pathlib import Path

import pytest

from pipeline.fixed_settings import fixed_settings
from pipeline.prompt_source import build_prompt_source
from pipeline.run_folder import RunFolder
from recovery.claim import claim_queue
from recovery.fixed import hold_to_fixed
from tests.pipeline.preview.planned import write_job
from vime.cli.exit_codes import ExitCode
from vime.cli.main import main
from vime.settings.parse import parse_settings


def started_run(folder: Path) -> list[str]:
    """A run folder as a first start leaves it; the words of its job."""
    words = write_job(folder)
    settings = parse_settings(words)
    run = RunFolder.of(settings)
    run.make()
    hold_to_fixed(run.root, fixed_settings(settings, build_prompt_source(settings)))
    claim_queue(run.root, run.queue, has_commits=False)
    return [*words, "--assume-gpus", "8"]


def dry_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = main(["train", "--dry-run", *words])
    return status, capsys.readouterr().out


def test_run_that_was_started_with_the_same_settings_has_no_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = dry_run(started_run(tmp_path), capsys)
    assert status == 0, out


def test_run_that_was_started_otherwise_is_the_problem_that_a_start_would_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = started_run(tmp_path)
    (tmp_path / "others.jsonl").write_text('{"input": "question", "label": "answer"}\n')
    changed = ["--prompt-data", str(tmp_path / "others.jsonl"), "--rollout-data-transport", "object-store"]
    (tmp_path / "run" / "settings.json").write_text('{"data": {"prompt_data": "/before/a.jsonl"}}')
    before = sorted(tmp_path.rglob("*"))
    status, out = dry_run([*words, *changed], capsys)
    assert status == 1
    assert re.search(
        r"holds a run that was started otherwise: --prompt-data and its keys give other prompts "
        r"\(digest [0-9a-f]{12}, was [0-9a-f]{12}, of /before/a.jsonl\)",
        out,
    )
    assert "--rollout-data-transport is object-store, was straw" in out
    assert "A start would fail" in out
    assert sorted(tmp_path.rglob("*")) == before


def test_queue_of_another_run_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = started_run(tmp_path)
    status, out = dry_run(
        [*words, "--save", str(tmp_path / "new"), "--rollout-data-dir", str(tmp_path / "run/rollout_data")], capsys
    )
    assert status == 1
    assert f"belongs to the run in {tmp_path / 'run'}" in out
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("flag", ["--save", "--rollout-data-dir"])
@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("/sys/x", "/sys is the kernel's (sysfs)"),
        ("/proc/foo", "/proc is the kernel's (proc)"),
    ],
)
def test_folder_that_cannot_be_written_is_a_problem(
    tmp_path: Path, flag: str, folder: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*write_job(tmp_path), "--assume-gpus", "8", flag, folder]
    status, out = dry_run(words, capsys)
    assert status == 1
    assert f"{flag} {words[-1]}: nothing can be written there" in out
    assert reason in out
    assert f"another folder with {flag}" in out


@pytest.mark.parametrize("transport", ["straw", "object-store"])
def test_disk_without_its_reserve_is_a_problem(
    tmp_path: Path, transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*write_job(tmp_path), "--assume-gpus", "8", "--rollout-data-transport", transport]
    status, out = dry_run([*words, "--rollout-disk-reserve-gib", "1e9"], capsys)
    assert status == ExitCode.ENVIRONMENT
    assert "GiB are free, 1000000000.00 GiB are needed (--rollout-disk-reserve-gib)" in out
    assert "A start would fail" in out


def test_older_commit_is_looked_for_in_save_when_load_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*started_run(tmp_path), "--ckpt-step", "4"]
    status, out = dry_run(words, capsys)
    assert status == 1
    assert f"{tmp_path / 'run'}: no commit of rollout 4; there is none at all." in out
