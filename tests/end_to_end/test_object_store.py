"""A real job with the default transport: its coordinator dies, and a resume generates again what was in memory."""

from pathlib import Path

import pytest

from recovery.audit import audit_run
from tests.end_to_end.jobs import Job, kill, shared_memory, survivors, tree, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_job_in_memory_trains_through_the_death_of_its_coordinator(tmp_path: Path) -> None:
    flags = {"--rollout-data-transport": None, "--save-interval": 2, "--actor-num-gpus-per-node": 2}
    job = Job(tmp_path, num_rollout=5, flags=flags)
    job.prepare()
    before = shared_memory()
    running = job.start()
    wait_until(lambda: len(job.steps()) >= 3, running)
    processes = tree(running.pid)
    kill(job.processes()["coordinator"])
    output, _ = running.communicate(timeout=120)
    assert running.returncode == 4, output
    assert "Samples travel through Ray's object store and their queue is in memory" in output
    assert "coordinator" in output
    assert survivors(processes) == []
    assert audit_run(job.run).rolled_back >= 8

    again = job.start()
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    assert "were not trained at that commit and ended with the memory of their session" in output
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], 5 * 8)
    assert report.identity_holds
    assert not (job.run / "rollout_data").exists()
    assert shared_memory() - before == set()
