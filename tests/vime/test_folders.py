"""What keeps a path from being a folder."""

from pathlib import Path

import pytest

from vime.cli.main import main
from vime.folders import existing_parent, file_in_the_way, unreachable


@pytest.mark.parametrize("below", [".", "run", "run/deeper"])
def test_a_file_at_the_path_or_above_it_is_in_the_way(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.touch()
    assert file_in_the_way(file / below) == file
    assert existing_parent(file / below) == file


def test_nothing_is_in_the_way_of_a_folder_or_of_one_that_can_be_made(tmp_path: Path) -> None:
    assert file_in_the_way(tmp_path) is None
    assert file_in_the_way(tmp_path / "new" / "deeper") is None
    assert existing_parent(tmp_path / "new" / "deeper") == tmp_path


@pytest.fixture
def odd(tmp_path: Path) -> dict[str, Path]:
    """Paths that the system can't look up, by why."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    return {
        "Too many levels of symbolic links": loop,
        "File name too long": tmp_path / ("n" * 300),
        "embedded null byte": tmp_path / "a\0b",
    }


def test_what_cannot_be_looked_up_says_why_and_what_is_not_there_is_no_fault(
    tmp_path: Path, odd: dict[str, Path]
) -> None:
    assert {unreachable(path) for path in odd.values()} == odd.keys()
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in (".", "file", "file/below", "absent/below", "dangling"):
        assert unreachable(tmp_path / name) is None


@pytest.mark.parametrize(
    "words", ["runs PATH", "queue status PATH", "audit PATH", "convert PATH t --to hf", "view PATH"]
)
def test_every_command_says_why_it_cannot_look_a_path_up(
    words: str, odd: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for reason, path in odd.items():
        assert main([str(path) if word == "PATH" else word for word in words.split()]) == 1
        assert f"can't be looked up: {reason}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag",
    [
        "--prompt-data",
        "--hf-checkpoint",
        "--load",
        "--ref-load",
        "--save",
        "--save-hf",
        "--rollout-data-dir",
        "--vllm-config",
        "--eval-config",
        "--load-debug-rollout-data",
        "--config",
        "--custom-config-path",
        "--opd-teacher-load",
        "--wandb-dir",
    ],
)
def test_every_flag_says_why_its_path_cannot_be_looked_up(
    flag: str, odd: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for reason, path in odd.items():
        assert main(["train", "--dry-run", flag, f"{path}"]) == 1
        said = capsys.readouterr().err
        assert f"{flag} is " in said
        assert f"({reason}), allowed: a path that can be looked up." in said
        assert "Unexpected" not in said


def test_text_that_is_no_utf8_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "--save", "run\udcff"]) == 1
    assert "--save holds bytes that are no text, allowed: UTF-8" in capsys.readouterr().err


def test_a_data_set_in_a_file_says_why_its_path_cannot_be_looked_up(
    tmp_path: Path, odd: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config, path = tmp_path / "eval.yaml", odd["File name too long"]
    config.write_text(f"eval: {{datasets: [{{name: a, path: {path}.jsonl}}]}}")
    assert main(["train", "--dry-run", "--eval-config", str(config), "--eval-interval", "1"]) == 1
    assert "File name too long" in capsys.readouterr().err
