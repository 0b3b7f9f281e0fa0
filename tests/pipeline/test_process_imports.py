"""What the processes of a run load before they know their work: a start costs as much for each of them."""

from __future__ import annotations

import subprocess
import sys


def test_driver_coordinator_producer_and_engine_actors_load_no_training_framework() -> None:
    heavy = ("torch", "megatron", "vllm", "transformers")
    code = f"import sys, pipeline.run; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"
