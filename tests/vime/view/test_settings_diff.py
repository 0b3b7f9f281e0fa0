"""Runs that are compared tell in which settings they differ."""

import json
from pathlib import Path
from typing import Any

import pytest

from vime.errors import StorageError
from vime.view.settings_diff import differences, read_settings


def write(root: Path, **groups: Any) -> Path:
    root.mkdir()
    (root / "settings.json").write_text(json.dumps(groups))
    return root


def test_flags_that_differ_are_listed_with_each_runs_value(tmp_path: Path) -> None:
    first = write(
        tmp_path / "a",
        trainer={"lr": 0.5, "seed": 1},
        sources={"--lr": "flag"},
        megatron_args=["--bf16", "--tensor-model-parallel-size", "2"],
        vllm_args=["--vllm-max-model-len=64"],
    )
    second = write(
        tmp_path / "b",
        trainer={"lr": 0.25, "seed": 1},
        sources={"--lr": "default"},
        megatron_args=["--tensor-model-parallel-size", "4"],
        vllm_args=["--vllm-max-model-len", "64"],
    )
    assert differences([read_settings(first), read_settings(second)]) == [
        ("--bf16", ["", None]),
        ("--lr", ["0.5", "0.25"]),
        ("--tensor-model-parallel-size", ["2", "4"]),
    ]


def test_settings_that_can_not_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(StorageError, match=r"settings\.json can't be read"):
        read_settings(tmp_path)
