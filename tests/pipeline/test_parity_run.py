"""Real trainer ranks and Ray, with a stand-in for the engine, whose log-probabilities no trainer can agree with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import parity_run
from pipeline.engine_group import EngineGroup
from pipeline.parity_verdict import refuse_difference
from tests.support.standin_engine import StandinEngine
from tests.support.tiny_models import build_tiny_qwen3
from vime.errors import ParityError
from vime.settings.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(300)
def test_each_engine_is_compared_after_a_publication_and_the_run_folder_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_tiny_qwen3(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"input": "r01234="}\n{"input": "r56789="}\n')
    settings = resolve(
        [
            *("--hf-checkpoint", str(tmp_path / "model"), "--prompt-data", str(tmp_path / "prompts.jsonl")),
            *("--num-rollout", "1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "1"),
            *("--rollout-max-response-len", "8", "--actor-num-gpus-per-node", "2", "--parity-probes", "2"),
            *("--save", str(tmp_path / "run")),
        ]
    ).settings
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with StandinEngine() as engine:

        async def addresses(_: EngineGroup, _report: Callable[[str], None]) -> list[str]:
            return [engine.address]

        monkeypatch.setattr(EngineGroup, "start", addresses)
        (found,) = parity_run.measure_parity(settings, tmp_path / "logs", lambda _: None)
        assert engine.version == "1", "the weights were published before"
    report = found.report
    assert (found.engine, report.fault) == ("Engine 0", None)
    assert report.num_tokens > 8
    assert report.gap.mean > 0.1
    with pytest.raises(ParityError, match="No known fault"):
        refuse_difference([found], settings.engine.parity_threshold)
    assert not (tmp_path / "run").exists()
