"""What the API server asks of every worker by name, through vLLM's `collective_rpc`."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.worker_base import WorkerBase

START_CAPTURE = "vime_start_capture"


def install() -> None:
    """Add the methods to vLLM's workers in this process; may be called more than once."""
    setattr(WorkerBase, START_CAPTURE, _start_capture)


def _start_capture(worker: Any, routes: bool, nucleus: bool) -> None:
    """`capture.start_capture`, once for a worker however many API servers ask."""
    # It imports the model runner, which only workers have.
    from vime.backends.vllm_utils.plugin.capture import start_capture

    if "vime_captures" not in vars(worker):
        start_capture(worker, routes, nucleus)
        worker.vime_captures = True
