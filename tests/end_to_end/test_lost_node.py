"""A node with the trainer's rank and the engine dies under a job, which goes on with both on another node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.audit import audit_run
from tests.end_to_end.jobs import REPOSITORY, Job, wait_until
from tests.support.ray_nodes import RayNodes

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(900)]

FLAGS = {"--parity-probes": 0, "--save-interval": 2}  # no trainer agrees with a stand-in
NUM_ROLLOUT = 12


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    """A cluster whose first node has room for the whole job."""
    with RayNodes() as nodes:
        nodes.add("first", 2)
        yield nodes


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path, NUM_ROLLOUT, FLAGS, ("--use-fault-tolerance",))
    job.prepare()
    return job


def end_after_a_loss(
    job: Job, nodes: RayNodes, monkeypatch: pytest.MonkeyPatch, num_steps: int, *further: str
) -> tuple[int, str]:
    """Status and output of the job that loses its node after some steps, when these further ones have come."""
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    running = job.start_with_standins()
    wait_until(lambda: len(job.steps()) >= num_steps, running)
    for name in further:
        nodes.add(name, 2)
    nodes.kill("first")
    output, _ = running.communicate(timeout=600)
    return running.returncode, output


def test_a_job_that_loses_a_node_goes_on_on_another_one_with_its_rank_and_its_engine(
    job: Job, nodes: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, output = end_after_a_loss(job, nodes, monkeypatch, 3, "second")
    assert status == 0, output
    assert "A trainer rank died: the ranks go back from rollout" in output
    assert "Lost from the Ray cluster: first. Started on second instead: trainer rank 0." in output
    assert "Lost from the Ray cluster: first. Started on second instead: engine 0." in output
    assert "serves again, with version" in output
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], NUM_ROLLOUT * 8)
    versions = [step["policy_version"] for step in job.steps()]
    assert versions == sorted(versions)


def test_a_job_that_loses_a_node_and_has_no_room_elsewhere_ends_naming_what_is_missing(
    job: Job, nodes: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, output = end_after_a_loss(job, nodes, monkeypatch, 1)
    assert status == 4, output
    assert "1 node (first) left the Ray cluster with trainer rank 0." in output
    assert "Training node 1 of 1 with 1 GPU finds no room" in output
    assert "Next: Add a node" in output
