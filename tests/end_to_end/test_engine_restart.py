"""A real engine behind a real router is killed in the middle of a run, which goes on with its successor."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from recovery.audit import audit_run
from tests.end_to_end.jobs import Job, kill, shared_memory, survivors, tree, wait_until
from vime.backends.vllm_utils.listening import claim_port

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(600)]


def complete(port: int, model: str) -> list[dict[str, Any]]:
    """What the router's OpenAI route answers an agent."""
    body = json.dumps({"model": model, "prompt": [1, 2, 3], "max_tokens": 2}).encode()
    headers = {"x-session-id": "agent", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        choices: list[dict[str, Any]] = json.load(answer)["choices"]
    return choices


def test_a_killed_engine_is_replaced_and_nothing_is_lost_or_left_over(tmp_path: Path) -> None:
    port = claim_port("127.0.0.1", 0)
    flags = {"--vllm-router-port": port, "--rollout-cleanup-timeout": 5}
    job = Job(tmp_path, num_rollout=5, flags=flags, switches=("--use-fault-tolerance",))
    job.prepare()
    before = shared_memory()
    running = job.start()
    wait_until(lambda: len(job.steps()) >= 1, running)
    assert complete(port, "model")[0]["finish_reason"] == "length"
    first = job.processes()["engines"]
    kill(first[0][-1])
    wait_until(lambda: job.processes()["engines"] not in ([[]], first), running)
    processes = tree(running.pid)
    output = _output(running)
    assert "engine 0 (http://127.0.0.1:" in output
    assert "failed and gets no requests; restart 1 of 3. Its process ended with status" in output
    assert "serves again, with version" in output
    assert survivors(processes) == []
    assert shared_memory() - before == set()
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], 5 * 8)
    assert job.steps()[-1]["dropped"] == {}


def _output(running: subprocess.Popen[str]) -> str:
    output, _ = running.communicate(timeout=300)
    assert running.returncode == 0, output
    return output
