"""Fused kernels on a GPU, and on a CPU by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from vime.backends.megatron_utils.fused.rule import runs_fused

CHECKS = ("gate", "heads", "statistics", "gradients")
ALL = ["rotated_heads", "swiglu"]


def test_interpreted_kernels_equal_dense_float64_with_their_gradients() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.vime.backends.megatron_utils.fused_checks"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {line.split()[0] for line in done.stdout.splitlines()} == set(CHECKS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHECKS)
def test_kernels_on_a_gpu_equal_dense_float64_with_their_gradients(name: str, dtype: torch.dtype) -> None:
    from tests.vime.backends.megatron_utils import fused_checks

    fused_checks.CHECKS[name]("cuda", dtype)


def test_work_on_a_cpu_is_not_fused() -> None:
    assert not runs_fused(torch.zeros(2, dtype=torch.bfloat16))


@pytest.fixture(scope="module")
def fused_steps(run_world: Any) -> dict[str, Any]:
    pytest.importorskip("triton")
    found: dict[str, Any] = run_world(1, ["fused_step"], worker="fused_worker.py")["fused_step"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("qwen3", ALL),  # with recomputed activations
        ("glm_plain", ALL),  # rotates neighbours in a quarter of each head
        ("deepseek_v3", ["swiglu"]),  # its rotary parts are apart from its heads
        ("llama_tied", ["swiglu"]),  # without rotation in each second layer
    ],
)
def test_a_step_with_fused_kernels_equals_one_without(fused_steps: Any, name: str, kernels: list[str]) -> None:
    assert fused_steps[name]["kernels"] == kernels
    assert fused_steps[name]["metrics"] < 1e-4
    assert fused_steps[name]["weights"] < 2e-5
