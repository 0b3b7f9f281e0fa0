"""`vime convert`: where it takes configuration from, what it checks first, and what it says meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vime.backends.megatron_utils.weight_source import WeightSource
from vime.cli import convert as command
from vime.cli.main import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with one Megatron checkpoint."""
    folder = tmp_path / "run"
    (folder / "iter_0000003").mkdir(parents=True)
    (folder / "iter_0000003" / ".metadata").touch()
    (folder / "rollout").mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    (folder / "settings.json").write_text(
        json.dumps({"checkpoint": {"hf_checkpoint": "/models/a", "model_name": "qwen3"}})
    )
    return folder


def source(folder: Path) -> WeightSource:
    return WeightSource("SOURCE", folder)


def test_configuration_is_the_sources_or_that_of_its_run_unless_it_is_named(run: Path, tmp_path: Path) -> None:
    assert command._hf_checkpoint(source(run), None) == Path("/models/a")
    assert command._hf_checkpoint(source(run), tmp_path / "b") == tmp_path / "b"
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").touch()
    assert command._hf_checkpoint(source(model), None) == model
    assert command._model_name(source(run), None) == "qwen3"
    assert command._model_name(source(run), "llama") == "llama"
    assert command._model_name(source(model), None) is None


def test_without_configuration_the_flag_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / ".metadata").touch()
    assert main(["convert", str(tmp_path / "weights"), str(tmp_path / "out"), "--to", "hf"]) == 1
    said = capsys.readouterr().err
    assert "holds no config.json of a Hugging Face model" in said
    assert "--hf-checkpoint" in said


@pytest.mark.parametrize(
    ("name", "message", "next_step"),
    [
        ("absent", "SOURCE {} doesn't exist.", "Correct the path."),
        ("file", "SOURCE {} is a file, not a folder.", "Correct the path."),
        ("empty", "SOURCE {} holds neither *.safetensors nor latest_checkpointed_iteration.txt.", "Give the folder of"),
    ],
)
def test_a_source_without_a_checkpoint_is_told_as_that(
    name: str, message: str, next_step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert main(["convert", str(tmp_path / name), str(tmp_path / "out"), "--to", "hf"]) == 1
    said = capsys.readouterr().err
    assert message.format(tmp_path / name) in said
    assert f"Next: {next_step}" in said
    assert "--hf-checkpoint" not in said


def test_a_commit_is_compared_with_its_digests_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "rollout" / "committed_3.json").write_text("{")
    assert main(["convert", str(run), str(run.parent / "out"), "--to", "hf"]) == 2
    assert "committed_3.json: damaged" in capsys.readouterr().err


def test_progress_outside_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([100.0, 101.0, 111.0, 112.0])
    monkeypatch.setattr(command.time, "monotonic", lambda: next(times))
    line = command._Line()
    for done in (1, 2, 3, 4):
        line("converting", done, 4)
    said = capsys.readouterr().err.splitlines()
    assert said == [f"converting: {done} of 4 parameters" for done in (1, 3, 4)]
