"""Finding the weights of a frozen model on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.backends.megatron_utils.weight_source import WeightSource
from vime.errors import RestoreError, SettingsError


def megatron(folder: Path, *iterations: int, newest: str | None = None) -> Path:
    for iteration in iterations:
        (folder / f"iter_{iteration:07d}").mkdir(parents=True)
    if newest is not None:
        (folder / "latest_checkpointed_iteration.txt").write_text(newest)
    return folder


def test_the_newest_iteration_is_taken_unless_a_number_is_given(tmp_path: Path) -> None:
    folder = megatron(tmp_path, 3, 12, newest="12\n")
    assert WeightSource("--ref-load", folder).megatron_folder() == folder / "iter_0000012"
    assert WeightSource("--ref-load", folder, 3).megatron_folder() == folder / "iter_0000003"
    assert not WeightSource("--ref-load", folder).is_hugging_face


def test_a_released_checkpoint_has_no_number(tmp_path: Path) -> None:
    (megatron(tmp_path, newest="release") / "release").mkdir()
    assert WeightSource("--ref-load", tmp_path).megatron_folder() == tmp_path / "release"


@pytest.mark.parametrize(
    ("newest", "iteration", "said"),
    [
        (None, None, r"--ref-load .* holds neither \*.safetensors nor latest_checkpointed_iteration.txt"),
        ("seven", None, r"holds 'seven', allowed: a number, or release"),
        ("4", None, r"iter_0000004 doesn't exist, found: iter_0000003"),
        ("3", 5, r"iter_0000005 doesn't exist, found: iter_0000003"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, newest: str | None, iteration: int | None, said: str) -> None:
    source = WeightSource("--ref-load", megatron(tmp_path, 3, newest=newest), iteration)
    with pytest.raises(RestoreError, match=said) as caught:
        source.megatron_folder()
    assert caught.value.next_step


def test_hugging_face_files_have_no_iterations(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert WeightSource("--ref-load", tmp_path).is_hugging_face
    WeightSource("--ref-load", tmp_path).refuse_unused_iteration()
    with pytest.raises(SettingsError, match="iteration 3 of it is asked for, allowed: no iteration"):
        WeightSource("--ref-load", tmp_path, 3).refuse_unused_iteration()
