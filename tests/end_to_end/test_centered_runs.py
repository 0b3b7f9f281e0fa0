"""Real jobs whose objective needs the sampler's candidates: engine, queue and trainer pass them on."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.jobs import Job, stored_samples

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(400)]

TOP_K = 24


def run(folder: Path, **flags: str) -> Job:
    words = {"--" + name.replace("_", "-"): value for name, value in flags.items()}
    job = Job(folder, num_rollout=2, flags=words, switches=("--use-score-centering",))
    job.prepare()
    running = job.start()
    output, _ = running.communicate(timeout=380)
    assert running.returncode == 0, output
    return job


def test_a_run_with_score_centering_trains_on_the_samplers_most_probable_tokens(tmp_path: Path) -> None:
    job = run(tmp_path, score_centering_top_k=str(TOP_K))
    first, second = (step["train"] for step in job.steps())
    for trained in (first, second):
        assert 0.4 < trained["sc_sampler_head_mass"] < 1.0
        assert 0.4 < trained["sc_train_head_mass"] < 1.0
        assert math.isfinite(trained["sc_correction"])
    # The first batch was sampled with the weights that are trained.
    assert first["sc_train_head_mass"] == pytest.approx(first["sc_sampler_head_mass"], abs=1e-3)
    assert first["sc_correction"] == pytest.approx(0.0, abs=1e-3)
    for sample in stored_samples(job):
        assert sample.rollout_topk_token_ids is not None
        assert sample.rollout_topk_token_ids.shape == (sample.response_length, TOP_K)


def test_a_run_with_top_p_replays_each_tokens_nucleus(tmp_path: Path) -> None:
    job = run(tmp_path, rollout_top_p="0.8")
    first, _ = (step["train"] for step in job.steps())
    assert first["sc_sampler_head_mass"] == pytest.approx(1.0, abs=1e-4)
    assert first["sc_correction"] == pytest.approx(0.0, abs=1e-3)
    for sample in stored_samples(job):
        assert sample.rollout_top_p_log_probs is not None
        assert sample.rollout_top_p_token_offsets is not None
        mass = np.add.reduceat(np.exp(sample.rollout_top_p_log_probs), sample.rollout_top_p_token_offsets[:-1])
        np.testing.assert_allclose(mass, 1.0, atol=1e-3)  # stored as float16
