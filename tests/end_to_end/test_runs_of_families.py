"""Every family of models is sampled, trained, published, committed and exported by the real engine and trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.jobs import Job
from tests.support.tiny_families import build_further_model, build_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(400)]

SIZES = {"hidden_size": 128, "intermediate_size": 256}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""The only sizes that vLLM's latent attention has on a CPU: those of the model itself."""


class FamilyJob(Job):
    """A job on another model; its new run starts with other weights than --hf-checkpoint has."""

    def prepare_family(self, name: str) -> None:
        self.prepare()
        for file in self.model.iterdir():
            file.unlink()
        for folder, seed in ((self.model, 1), (self.folder / "start", 2)):
            if name == "deepseek_v3":
                build_further_model(folder, seed=seed, **SIZES, **LATENT)
            else:
                build_tiny_model(folder, name, seed=seed, **SIZES)
        if name == "deepseek_v3":
            self.switches, self.flags = ("--use-rollout-routing-replay",), {"--mtp-num-layers": 1}
        self.flags |= {
            "--load": self.folder / "start",
            "--save-hf": f"{self.folder}/export/{{rollout_id}}",
            "--lr": 1e-4,
        }


@pytest.mark.parametrize("name", ["qwen2", "llama_scaled", "glm", "qwen3_moe", "deepseek_v3"])
def test_a_family_trains_on_what_it_publishes(tmp_path: Path, name: str) -> None:
    job = FamilyJob(tmp_path, num_rollout=2)
    job.prepare_family(name)
    running = job.start()
    try:
        output, _ = running.communicate(timeout=380)
    finally:
        running.kill()
    assert running.returncode == 0, output
    assert "The actor starts with the weights of --load" in output
    fresh = [step["train"]["train_rollout_logprob_abs_diff"] for step in job.steps() if step["staleness_max"] == 0]
    assert fresh, "the first batch is sampled from the weights that are trained"
    assert max(fresh) < 1e-4
    further = ["mtp_loss" in step["train"] for step in job.steps()]
    assert further == [name == "deepseek_v3"] * 2
    replayed = {step["train"]["routing_replay_fraction"] for step in job.steps() if name == "deepseek_v3"}
    assert replayed <= {1.0}, "the sampler's experts, of layers with experts alone"
    start, *exports = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "start", tmp_path / "export" / "0", tmp_path / "export" / "1")
    )
    assert [export.keys() == start.keys() for export in exports] == [True, True]
    moved = [max(float((export[key] - start[key]).abs().max()) for key in start) for export in exports]
    assert 1e-5 < moved[0] < moved[1] < 1e-2, "from the weights of --load, a step at a time"
    assert (tmp_path / "export" / "1" / "config.json").read_text() == (job.model / "config.json").read_text()
    assert json.loads((tmp_path / "export" / "1" / "vime_export.json").read_text())
    assert all(torch.isfinite(tensor).all() for tensor in exports[1].values())
