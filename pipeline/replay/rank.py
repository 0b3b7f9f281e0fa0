"""One trainer rank of a replay: python -m pipeline.replay.rank SCRATCH RANK."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from pipeline.pool_wiring import open_pool
from pipeline.process_log import log_to_file
from pipeline.replay.job import RankError, Stage, error_path, log_path, read_job
from pipeline.run_folder import RunFolder
from pipeline.trainer_wiring import build_trainer_worker
from storage.files import write_atomically
from vime.errors import VimeError


def main(scratch: Path, rank: int) -> int:
    """Train what the job in `scratch` says; results go to the training log there. The exit status."""
    log_to_file(log_path(scratch, rank))
    job = read_job(scratch)
    try:
        for number, stage in enumerate(job.stages):
            _run(stage, scratch, rank, job.world_size, f"file://{scratch / f'meeting_{number}'}")
    except VimeError as error:
        told = RankError(type(error).__name__, error.message, error.next_step)
        write_atomically(error_path(scratch, rank), msgspec.json.encode(told))
        return 1
    return 0


def _run(stage: Stage, scratch: Path, rank: int, world_size: int, meeting: str) -> None:
    folder = RunFolder.of(stage.settings)
    pool = open_pool(stage.settings, None)
    worker = build_trainer_worker(stage.settings, folder, pool, rank, world_size, meeting)
    try:
        if stage.directory is None or stage.rollout_id is None:
            worker.load_start()
        else:
            worker.load(Path(stage.directory), stage.rollout_id)
        for plan in stage.plans:
            worker.train(plan)
        if stage.saves:
            worker.save(scratch, stage.plans[-1].rollout_id)
    finally:
        worker.close()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
