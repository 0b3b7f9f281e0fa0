"""The command lines of all examples but `reverse`, and those with rewards of their own for two rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from recovery.audit import audit_run
from tests.examples.run_script import settings_of, steps_of
from vime.settings.validate import validate

EXAMPLES = {
    "gym": "model",
    "judge": "example/model",
    "multi_turn_tool": "example/model",
    "evaluation": "example/model",
}


@pytest.mark.parametrize(("name", "model"), EXAMPLES.items())
def test_the_command_line_passes_every_check(tmp_path: Path, name: str, model: str) -> None:
    settings = settings_of(tmp_path, name, model, {"model_type": "qwen3"}, "--num-rollout", "2")
    validate(settings)
    assert settings.data.num_rollout == 2
    assert settings.megatron_args == ()


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.multiproc
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["gym", "judge", "multi_turn_tool"])
def test_two_rollouts_are_rewarded_and_trained(tmp_path: Path, name: str) -> None:
    if name == "gym":
        pytest.importorskip("reasoning_gym", reason="an optional package: requirements/tasks.txt")
    steps = steps_of(tmp_path, name, "--num-rollout", "2", "--rollout-batch-size", "8")
    assert len(steps) == 2
    assert all(0.1 < step["reward_mean"] < 0.95 for step in steps)
    report = audit_run(tmp_path / "run")
    assert (report.lost, report.trained_twice, report.trained) == ([], [], 16)
