"""An evaluator on stand-in engines, in one process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.evaluation.dumps import EvaluationDumps
from pipeline.evaluation.evaluator import EvaluatedSet, Evaluator, EvaluatorSettings
from pipeline.evaluation.keeper import ResultKeeper
from pipeline.evaluation.log_function import EvalLog
from pipeline.evaluation.prompts import eval_sampling, open_eval_set
from pipeline.request_gate import RequestGate
from pipeline.sample_maker import MakerSettings, SampleMaker
from pipeline.serving_engines import ServingEngines
from tests.pipeline.stream_parts import CharTokenizer
from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import NO_COLUMNS, SampleColumns
from vime.rollout.generate import GenerateSettings, SampleGenerator
from vime.rollout.prompt_text import PromptText
from vime.rollout.rewards import RewardFunction
from vime.rollout.sampling import SamplingSettings
from vime.settings.parse import parse_settings
from vime.settings.schemas.eval_sets import evaluation_sets
from vime.utils.types import Sample


async def by_label(args: Any, sample: Sample) -> float:  # noqa: ARG001
    return float(sample.label)


def write_prompts(path: Path, labels: list[float]) -> Path:
    """One prompt for each label."""
    lines = [json.dumps({"input": f"prompt {number}", "answer": label}) for number, label in enumerate(labels)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@dataclass
class Rig:
    """What a test drives."""

    folder: Path
    evaluator: Evaluator
    gate: RequestGate
    client: EngineClient

    def answers(self, step: int) -> list[dict[str, Any]]:
        """Lines of the file of an evaluation."""
        lines = (self.folder / "evaluations" / f"{step}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@asynccontextmanager
async def evaluator(
    folder: Path,
    engine: StandinEngine,
    argv: list[str],
    *,
    reward: RewardFunction = by_label,
    columns: SampleColumns = NO_COLUMNS,
    reward_timeout_s: float = 20.0,
    max_requests: int = 16,
    log: str | None = None,
    dumps: EvaluationDumps | None = None,
) -> AsyncIterator[Rig]:
    """An evaluator of the data sets that `argv` names, admitted at policy version 1."""
    settings = parse_settings(["--eval-label-key", "answer", "--rollout-max-response-len", "6", *argv])
    text = PromptText(CharTokenizer(), apply_chat_template=False)
    sets = [
        EvaluatedSet(
            open_eval_set(options, settings, text), eval_sampling(options, settings, None), reward, options.reward_key
        )
        for options in evaluation_sets(settings)
    ]
    async with EngineClient(engine.address) as client:
        gate = RequestGate(ServingEngines([client]))
        generator = SampleGenerator(CharTokenizer(), GenerateSettings(False, columns=columns))
        maker = SampleMaker(MakerSettings(SamplingSettings(1), 1.0, None, True), gate, generator, None, None)
        limits = EvaluatorSettings(max_requests, 3, reward_timeout_s, retry_s=0.01)
        keeper = ResultKeeper(folder, EvalLog(log, None) if log else None, dumps)
        gate.resume(1)
        yield Rig(folder, Evaluator(limits, sets, maker, None, keeper), gate, client)
