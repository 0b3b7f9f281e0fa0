"""`--rollout-data-transport nixl` where it can't work: refused with the reason, at a real start only."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline.transports import nixl_probe
from pipeline.transports.nixl_probe import nixl_problems, why_no_nixl
from vime.cli.main import main
from vime.settings.groups import Settings
from vime.settings.parse import parse_settings


def settings(transport: str) -> Settings:
    return parse_settings(["--rollout-data-transport", transport])


def with_probe(monkeypatch: pytest.MonkeyPatch, status: int, stderr: str) -> None:
    """nixl is installed, and starting an agent ends like this."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    done: Any = subprocess.CompletedProcess([], status, "", stderr)
    monkeypatch.setattr(nixl_probe.subprocess, "run", lambda *_, **__: done)


def test_a_missing_package_is_named_with_the_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    (problem,) = nixl_problems(settings("nixl"))
    assert str(problem).startswith(
        "--rollout-data-transport is nixl, allowed: object-store or straw on this machine. Ray 2."
    )
    assert "needs the package nixl, which is not installed" in str(problem)
    assert "object-store needs nothing" in problem.next_step


def test_an_agent_that_does_not_start_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with_probe(monkeypatch, 1, "Traceback ...\nnixlBackendError: no UCX device\n")
    assert "A NIXL agent can't start" in (why_no_nixl() or "")
    assert "nixlBackendError: no UCX device." in (why_no_nixl() or "")


def test_a_ray_without_the_transport_is_told_by_the_probe_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(nixl_probe, "_PROBE", "from ray.experimental.rdt_of_another_version import agent")
    assert "No module named 'ray.experimental.rdt_of_another_version'." in (why_no_nixl() or "")


def test_an_agent_that_starts_is_no_problem_and_others_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with_probe(monkeypatch, 0, "")
    assert nixl_problems(settings("nixl")) == []
    with_probe(monkeypatch, 1, "no")
    assert nixl_problems(settings("object-store")) == nixl_problems(settings("straw")) == []


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("pipeline.transports.nixl_probe.why_no_nixl", lambda: "There is no NIXL here.")
    (tmp_path / "config.json").write_text(
        json.dumps({
            "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
            "num_key_value_heads": 2, "vocab_size": 32, "intermediate_size": 8, "head_dim": 4,
        })
    )  # fmt: skip
    (tmp_path / "p.jsonl").write_text('{"input": "a"}\n')
    return [
        "train", "--hf-checkpoint", str(tmp_path), "--prompt-data", str(tmp_path / "p.jsonl"), "--num-rollout", "3",
        "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8",
        "--rm-type", "random", "--save", str(tmp_path / "run"), "--actor-num-gpus-per-node", "1",
        "--rollout-data-transport", "nixl",
    ]  # fmt: skip


def test_a_start_is_refused(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    assert "--rollout-data-transport is nixl, allowed: object-store or straw" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_dry_run_warns(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "There is no NIXL here." in shown
    assert "Samples travel through NIXL, out of the producers' memory and their queue is in memory" in shown
