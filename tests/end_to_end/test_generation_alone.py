"""--debug-rollout-only on stand-in engines: batches are generated and archived, and nothing of them is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recovery.audit import audit_run
from recovery.commit import committed_rollouts
from storage.archive import RolloutArchive
from tests.end_to_end.jobs import Job
from tests.end_to_end.standin_jobs import run_standin

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(900)]


def test_generation_alone_archives_its_batches_and_leaves_them_to_a_later_run(tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "--num-rollout": 2,
        "--flush-cache-interval": None,
        "--save-debug-rollout-data": tmp_path / "dumps" / "{rollout_id}.straw.json",
    }
    job = Job(tmp_path, flags=flags, switches=("--debug-rollout-only",))
    job.prepare()
    done = run_standin(job)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing is committed, a run in this folder trains it" in done.stdout
    assert committed_rollouts(job.run) == []
    assert not list((job.run / "logs").glob("trainer*"))
    for rollout_id in range(2):
        with RolloutArchive.open(tmp_path / "dumps" / f"{rollout_id}.straw.json") as archive:
            samples = archive.load_samples()
        assert len(samples) == 8 * 4
        assert {span[0] for sample in samples for span in sample.version_spans} == {0}
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice) == ([], [])
