"""One job with the real engine, queue and Ray and two trainer ranks; its coordinator is killed on the way."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from recovery.audit import audit_run
from recovery.audit_parts import AuditReport
from recovery.commit import committed_rollouts
from tests.end_to_end.jobs import Job, kill, shared_memory, stored_samples, survivors, tree, wait_until
from vime.data.batch import PackedMicrobatch
from vime.utils.types import Sample

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(400)]


@dataclass
class Finished:
    """What a finished job left."""

    job: Job
    status: int
    output: str
    audit: AuditReport
    processes: list[psutil.Process]
    new_segments: set[str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    job = Job(tmp_path_factory.mktemp("job"), num_rollout=4, flags={"--actor-num-gpus-per-node": 2})
    job.prepare()
    before = shared_memory()
    running = job.start()
    processes: list[psutil.Process] = []
    try:
        wait_until(lambda: len(job.steps()) >= 1, running)
        processes = tree(running.pid)
        kill(job.processes()["coordinator"])
        output, _ = running.communicate(timeout=300)
    finally:
        for process in processes:
            if process.is_running():
                process.kill()
        running.kill()
    new_segments = shared_memory() - before
    return Finished(job, running.returncode, output, audit_run(job.run), processes, new_segments)


def test_job_trains_every_rollout_and_exits_0_though_its_coordinator_was_killed(finished: Finished) -> None:
    assert finished.status == 0, finished.output
    assert [step["rollout_id"] for step in finished.job.steps()] == [0, 1, 2, 3]
    assert committed_rollouts(finished.job.run) == [0, 1, 2, 3]


def test_nothing_is_lost_or_trained_twice(finished: Finished) -> None:
    report = finished.audit
    assert (report.lost, report.trained_twice, report.trained) == ([], [], 4 * 8)
    assert report.identity_holds


def test_identity_is_printed_at_start_and_end(finished: Finished) -> None:
    assert "At start: generated 0 = trained 0" in finished.output
    assert "At end: generated " in finished.output
    assert "bottleneck" in finished.output or "keep pace" in finished.output


def test_the_engine_is_compared_with_the_trainer_at_the_start(finished: Finished) -> None:
    (line,) = [line for line in finished.output.splitlines() if line.startswith("Engine 0 against the trainer on ")]
    assert float(line.rpartition("max ")[2].rstrip(".")) < 1e-4


def test_nothing_is_left_running_after_the_job(finished: Finished) -> None:
    assert survivors(finished.processes) == []
    assert finished.new_segments == set()


def packed(sample: Sample) -> PackedMicrobatch:
    return PackedMicrobatch(
        tokens=np.asarray(sample.tokens, np.int32),
        cu_seqlens=np.asarray([0, len(sample.tokens)], np.int32),
        response_lengths=np.asarray([sample.response_length], np.int32),
        loss_mask=sample.mask_array(),
        sampler_log_probs=np.asarray(sample.rollout_log_probs, np.float32),
        advantages=np.zeros(1, np.float32),
        mask_sums=np.asarray([sample.response_length], np.float32),
        sample_indices=np.asarray([sample.index], np.int64),
    )


def test_trainer_and_engine_agree_on_log_probabilities_before_and_after_publications(finished: Finished) -> None:
    """Each sample is scored with the weights of its version: the checkpoint's for 1, rollout r's commit for r + 2."""
    from vime.backends.megatron_utils.config import TrainerConfig
    from vime.backends.megatron_utils.trainer import MegatronTrainer

    by_version: dict[int, list[Sample]] = {}
    for sample in stored_samples(finished.job):
        if len(sample.version_spans) == 1:
            by_version.setdefault(sample.version_spans[0][0], []).append(sample)
    assert 1 in by_version
    assert len(by_version) > 1, "no sample was made after a publication"
    trainer = MegatronTrainer(
        TrainerConfig(hf_checkpoint=finished.job.model, lr=1e-3, global_batch_size=32),
        0,
        1,
        f"file://{finished.job.folder}/meet",
    )
    try:
        for version, samples in by_version.items():
            if version == 1:
                trainer.load_hf()
            else:
                trainer.load(finished.job.run, version - 2)
            scored = trainer.log_probs([packed(sample) for sample in samples])
            gaps = [
                np.abs(log_probs - np.asarray(sample.rollout_log_probs, np.float32)).mean()
                for log_probs, sample in zip(scored, samples, strict=True)
            ]
            assert float(np.mean(gaps)) < 1e-4, f"version {version}: {np.mean(gaps)}"
    finally:
        trainer.close()


def test_another_start_has_nothing_to_do(finished: Finished) -> None:
    again = finished.job.start()
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output
    assert "Nothing to do: already at 4 of 4." in output


def test_fewer_rollouts_than_committed_are_refused_with_both_numbers(finished: Finished) -> None:
    again = Job(finished.job.folder, num_rollout=2, flags=finished.job.flags).start()
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 1
    assert "4 rollouts in, past --num-rollout 2" in output
    assert "Next: " in output


def test_run_folder_holds_the_record_of_the_run(finished: Finished) -> None:
    run: Path = finished.job.run
    logs = {path.name for path in (run / "logs").iterdir()}
    assert {"coordinator.log", "engine_0.log", "producer_0.log", "trainer_0.log", "trainer_1.log"} <= logs
    assert (run / "settings.json").exists()
    assert finished.job.steps()[-1]["train"]["grad_norm"] > 0
