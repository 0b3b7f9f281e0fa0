"""A whole run with every copy of its metrics: trainer, queue, producers and Ray are real, engines are stand-ins."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.sample_metrics import MEANINGS
from tests.end_to_end.jobs import REPOSITORY, Job, run_with_standins
from tests.pipeline.metric_sinks.wandb_file import offline_run

pytestmark = [pytest.mark.slow, pytest.mark.multiproc, pytest.mark.timeout(600)]

DASHBOARD = REPOSITORY / "deploy" / "grafana" / "vime.json"


class Scraper(threading.Thread):
    """Scrapes whatever a run says can be scraped until it is told to stop."""

    def __init__(self, targets: Path) -> None:
        super().__init__(daemon=True)
        self._targets, self.ended = targets, threading.Event()
        self.found: dict[str, set[str]] = {}
        """Process -> names of the metrics that it answered."""

    def run(self) -> None:
        while not self.ended.wait(0.1):
            for path in self._targets.glob("*.json"):
                if not path.name.startswith("engine"):
                    self._scrape(path)

    def _scrape(self, path: Path) -> None:
        try:
            (target,) = json.loads(path.read_text())[0]["targets"]
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
                families = list(text_string_to_metric_families(answer.read().decode()))
        except OSError:
            return  # the process is ending
        self.found.setdefault(path.stem, set()).update(family.name for family in families)


def test_all_copies_hold_the_steps_of_the_run(tmp_path: Path) -> None:
    flags = {
        "--parity-probes": 0,  # no trainer agrees with a stand-in
        "--wandb-mode": "offline",
        "--prometheus-port": 0,
        "--vllm-speculative-config": json.dumps({"method": "ngram", "num_speculative_tokens": 4}),
    }
    job = Job(tmp_path, num_rollout=2, flags=flags, switches=("--use-tensorboard", "--use-wandb"))
    job.prepare()
    scraper = Scraper(job.run / "prometheus")
    scraper.start()
    output = run_with_standins(job)
    scraper.ended.set()
    scraper.join()

    assert "warning" not in output
    rewards = [step["reward_mean"] for step in job.steps()]
    events = EventAccumulator(str(job.run / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("rollout/raw_reward")] == list(
        enumerate(pytest.approx(reward) for reward in rewards)
    )
    for step in job.steps():
        found = step["sample_metrics"]
        assert found["rollout/spec_accept_rate"] == 0.25
        assert 2 <= found["rollout/spec_accept_length"] < 3, "of an odd number of tokens the last has no draft"
        assert found["rollout/repetition_frac"] == found["rollout/staleness/unknown_count"] == 0
        assert found["rollout/avg_cached_tokens_per_sample"] >= 0
        assert found["perf/tokens_per_gpu_per_sec"] == pytest.approx(step["trained_tokens_per_s"])
        assert found["perf/effective_tokens_per_gpu_per_sec"] == found["perf/tokens_per_gpu_per_sec"]
        assert found["perf/longest_sample_tokens_per_sec"] == step["response_tokens_max"] / step["step_s"]
        assert found["perf/non_generation_time/max"] >= found["perf/non_generation_time/median"] > 0
        assert set(found) <= set(MEANINGS)
    assert len(events.Scalars("rollout/spec_accept_length")) == len(events.Scalars("rollout/repetition_frac")) == 2
    (path,) = (job.run / "wandb").glob("offline-run-*/run-*.wandb")
    assert [row["rollout/raw_reward"] for row in offline_run(path).rows] == pytest.approx(rewards)
    assert list((job.run / "prometheus").iterdir()) == []
    assert "vime_coordinator_pending" in scraper.found["coordinator"]
    assert "vime_producer_tokens_generated" in scraper.found["producer_0"]
    assert "vime_trainer_train_s" in scraper.found["trainer_0"]
    assert "vime_run_reward_mean" in scraper.found["run"]
    shown = set(re.findall(r"vllm_router_\w+", DASHBOARD.read_text()))
    assert shown
    assert {name.removesuffix("_total") for name in shown} <= scraper.found["router_default"]
