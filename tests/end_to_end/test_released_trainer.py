"""With --release-train the trainer's processes end after each publication and go on from the commit as they were."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from recovery.audit import audit_run
from recovery.commit import committed_rollouts
from tests.end_to_end.jobs import Job, run_with_standins, stored_samples, survivors
from vime.backends.megatron_utils.torch_dist_files import TorchDistReader

pytestmark = [pytest.mark.slow, pytest.mark.multiproc, pytest.mark.timeout(600)]


def released_job(folder: Path, *, released: bool = True, **flags: Any) -> Job:
    """Every batch is sampled under the weights that it trains."""
    common = {
        "--flush-cache-interval": 1,
        "--max-staleness": 0,
        "--trainer-num-threads": 1,
        "--update-weight-transport": "disk",
        "--update-weight-disk-dir": folder / "published",
    }
    folder.mkdir(exist_ok=True)
    switches = ("--release-train",) if released else ()
    job = Job(folder, num_rollout=3, flags=common | flags, switches=switches)
    job.prepare()
    return job


@pytest.mark.engine
def test_every_batch_is_trained_by_new_processes_that_hold_the_weights_of_the_engine(tmp_path: Path) -> None:
    job = released_job(tmp_path, **{"--rollout-data-transport": "object-store"})
    running = job.start()
    seen: list[list[int]] = []
    try:
        while running.poll() is None:
            if (job.run / "processes.json").exists() and job.processes()["trainers"] not in seen[-1:]:
                seen.append(job.processes()["trainers"])
                if not seen[-1] and len(seen) > 1:
                    ended = [psutil.Process(pid) for pid in seen[-2] if psutil.pid_exists(pid)]
                    assert survivors(ended, timeout_s=5) == [], "a released rank gives its memory back"
            time.sleep(0.02)
        output = running.communicate()[0]
    finally:
        running.kill()
    assert running.returncode == 0, output
    lives = [pids for pids in seen if pids]
    assert len({pid for pids in lives for pid in pids}) == len(lives) == 4, "one publishes first, one trains each batch"
    assert [] in seen
    steps = job.steps()
    assert [step["staleness_max"] for step in steps] == [0, 0, 0]
    assert max(step["train"]["train_rollout_logprob_abs_diff"] for step in steps) < 1e-4
    assert committed_rollouts(job.run) == [0, 1, 2]
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], 3 * 8)


def tensors(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All of a checkpoint, those of the optimizer too."""
    reader = TorchDistReader(checkpoint)
    for key in sorted(reader.tensor_keys):
        shape = reader.shape(key)
        yield key, reader.read(key, [0] * len(shape), shape)


def test_a_released_actor_and_critic_learn_bit_by_bit_what_those_that_stay_learn(tmp_path: Path) -> None:
    flags = {
        "--advantage-estimator": "ppo",
        "--lr-warmup-iters": 2,
        "--weight-decay": 0.1,
        "--parity-probes": 0,  # no trainer agrees with a stand-in
        "--rollout-batch-size": 1,  # of more groups, the order in which they end is chance
    }
    stay, released = (
        released_job(tmp_path / name, released=name == "released", **flags) for name in ("stay", "released")
    )
    for job in (stay, released):
        run_with_standins(job)
    assert [step["train"] for step in released.steps()] == [step["train"] for step in stay.steps()]
    assert len({step["train"]["value_loss"] for step in stay.steps()}) == 3, "each batch is another one"
    samples = [[(each.index, each.tokens, each.reward) for each in stored_samples(job)] for job in (stay, released)]
    assert sorted(samples[0]) == sorted(samples[1]), "stand-ins answer by the weights that were published to them"
    for model in ("", "critic"):
        kept, restored = (dict(tensors(job.run / "iter_0000002" / model)) for job in (stay, released))
        assert kept.keys() == restored.keys()
        assert [key for key in kept if not torch.equal(kept[key], restored[key])] == []
