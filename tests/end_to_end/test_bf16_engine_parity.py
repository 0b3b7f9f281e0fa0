"""A real engine in bfloat16 against the float32 trainer: how far apart they are, and whether a known setting is why."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pipeline.parity_probe import probe_engines
from pipeline.parity_verdict import EngineParity, engine_parity, refuse_difference
from pipeline.probe_sequence import ProbeSequence, pack_probe
from tests.end_to_end.jobs import Job
from tests.support.tiny_models import build_tiny_qwen3
from vime.backends.megatron_utils.config import TrainerConfig
from vime.backends.megatron_utils.trainer import MegatronTrainer
from vime.backends.vllm_utils import server
from vime.backends.vllm_utils.launch import EngineCommand, EngineLaunch, engine_command
from vime.errors import ParityError
from vime.settings.resolve import resolve

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.multiproc, pytest.mark.timeout(400)]

TEMPERATURE = 0.7
THRESHOLD = 0.05
BF16_MEAN = 2e-2
"""Most that the rounding of bfloat16 leaves of a mean difference."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = Job(tmp_path_factory.mktemp("parity"), flags={"--rollout-temperature": TEMPERATURE})
    job.prepare()
    build_tiny_qwen3(job.model, init_std=0.08)
    return job


@pytest.fixture(scope="module")
def trainer(job: Job) -> Iterator[MegatronTrainer]:
    config = TrainerConfig(hf_checkpoint=job.model, lr=1e-3, global_batch_size=32, temperature=TEMPERATURE)
    with MegatronTrainer(config, 0, 1, f"file://{job.folder}/meet") as trainer:
        trainer.load_hf()
        yield trainer


def compared(job: Job, trainer: MegatronTrainer, log_path: Path) -> EngineParity:
    """The trainer and a new engine in bfloat16, as the probe at the start of a run compares them."""
    launch = EngineLaunch(job.model, "127.0.0.1", 0, log_path, "test", dtype="bfloat16", max_model_len=64)
    with server.EngineServer(launch) as engine:
        engine.wait_ready()
        (sequences,) = asyncio.run(probe_engines(resolve(job.command()[4:]).settings, [engine.address]))

    async def score(sequences: Sequence[ProbeSequence], start_weights: bool) -> dict[str, list[float]]:
        packed = [pack_probe(sequence, None) for sequence in sequences]
        if start_weights:
            return {"start_weights": trainer.probe_start_weights(packed).tolist()}
        return {name: values.tolist() for name, values in trainer.probe(packed).items()}

    return asyncio.run(engine_parity("Engine 0", sequences, score, temperature=TEMPERATURE, threshold=THRESHOLD))


def test_an_engine_in_bf16_is_within_the_rounding_and_no_setting_is_blamed(
    job: Job, trainer: MegatronTrainer, tmp_path: Path
) -> None:
    parity = compared(job, trainer, tmp_path / "engine.log")
    gap = parity.report.gap
    assert 1e-4 < gap.mean < BF16_MEAN
    assert gap.mean <= gap.p99 <= gap.max
    assert parity.report.fault is None
    refuse_difference([parity], THRESHOLD)


def test_an_engine_in_bf16_that_reports_raw_log_probabilities_is_refused_with_that_setting_by_name(
    job: Job, trainer: MegatronTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_raw_log_probs(launch: EngineLaunch) -> EngineCommand:
        command = engine_command(launch)
        argv = tuple(word.replace("processed_logprobs", "raw_logprobs") for word in command.argv)
        return dataclasses.replace(command, argv=argv)

    monkeypatch.setattr(server, "engine_command", with_raw_log_probs)
    parity = compared(job, trainer, tmp_path / "engine.log")
    assert parity.report.gap.mean > THRESHOLD
    findings = {finding.fault: finding for finding in parity.report.findings}
    assert [fault for fault, finding in findings.items() if finding.differs] == ["raw_log_probs"]
    left = findings["raw_log_probs"].gap
    assert left is not None
    assert left.mean < BF16_MEAN, "what is left once the setting is accounted for is rounding"
    with pytest.raises(ParityError, match=r"mean 0\.\d+, p99 .*, max .*raw_log_probs: .*before temperature") as caught:
        refuse_difference([parity], THRESHOLD)
    assert "--logprobs-mode processed_logprobs" in str(caught.value.next_step)
