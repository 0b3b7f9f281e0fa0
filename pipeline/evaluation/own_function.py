"""--eval-function-path: evaluation by a function of the user's own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from copy import copy
from typing import Any

from pipeline.evaluation.answers import answer_of
from pipeline.evaluation.keeper import ResultKeeper
from pipeline.evaluation.records import EvalAnswer, EvaluationRecord
from vime.errors import RewardError, VimeError
from vime.rollout.base_types import RolloutFnEvalOutput
from vime.rollout.evaluation_call import EvaluationCall, bind
from vime.rollout.rewards import reward_value
from vime.rollout.rewards.own_functions import is_async
from vime.settings.groups import Settings
from vime.settings.import_paths import load_function
from vime.utils.types import Sample

logger = logging.getLogger(__name__)

FLAG = "--eval-function-path"

StockResults = Callable[[], Coroutine[Any, Any, Mapping[str, Mapping[str, Any]]]]
"""Name of a data set -> its rewards, truncated and samples."""


def own_eval_function(settings: Settings) -> str | None:
    """Import path of the function that evaluates; None for vime's own evaluation.

    A rollout function of the user's own evaluates too, unless requests outlive publications.
    """
    path = settings.evaluation.eval_function_path
    if path is None and settings.weights.flush_cache_interval == 1:
        path = settings.rollout.rollout_function_path
    return None if path is None or path.startswith("vime.") else path


class OwnEvaluator:
    """Calls `f(args, rollout_id, data_source, evaluation=True)` and keeps what it returned as vime's own would be."""

    def __init__(
        self, path: str, hook_args: Any, attempts: Mapping[str, int], keeper: ResultKeeper, stock: StockResults
    ) -> None:
        """`attempts`: data set -> answers to each prompt; 1 for others. `stock` is vime's own evaluation."""
        self._path, self._hook_args, self._attempts, self._keeper = path, hook_args, attempts, keeper
        self._stock = stock
        self._generated: defaultdict[tuple[int, str], asyncio.Event] = defaultdict(asyncio.Event)

    async def evaluate(self, step: int, branch: str) -> EvaluationRecord:
        """Call the function; what it raises becomes the record's problem. Raises `StorageError`."""
        started = time.monotonic()
        output, answers, problem = RolloutFnEvalOutput({}), dict[str, list[EvalAnswer]](), ""
        try:
            output = await self._call(step)
            answers = {name: self._answers(name, result) for name, result in output.data.items()}
        except VimeError as error:
            problem = f"{FLAG} {self._path}: {error.message}"
        except Exception as error:  # the boundary to user code: whatever it raises becomes the reason
            logger.exception("%s %s failed at step %d", FLAG, self._path, step)
            problem = f"{FLAG} {self._path} raised {type(error).__name__}: {error}"
        finally:
            self._generated[step, branch].set()
        return await self._keeper.keep(
            answers,
            output.data,
            step=step,
            branch=branch,
            started=started,
            generate_s=time.monotonic() - started,
            more_metrics={name: float(value) for name, value in (output.metrics or {}).items()},
            problem=problem,
        )

    async def generated(self, step: int, branch: str) -> None:
        """Wait until the function has returned, also where it is yet to be called: requests may overtake each other."""
        await self._generated[step, branch].wait()

    async def _call(self, step: int) -> RolloutFnEvalOutput:
        """The function's answer; it runs on a thread of its own, and takes no training prompts."""
        function = load_function(FLAG, self._path)
        call_of_stock = EvaluationCall(self._stock, asyncio.get_running_loop())

        def call() -> Any:
            bind(call_of_stock)
            called = function(self._hook_args, step, None, evaluation=True)
            return asyncio.run(called) if is_async(function) else called

        answer = await asyncio.to_thread(call)
        output = RolloutFnEvalOutput(answer) if isinstance(answer, Mapping) else answer
        if not isinstance(output, RolloutFnEvalOutput):
            raise VimeError(f"it returned a {type(answer).__name__}, allowed: a RolloutFnEvalOutput or its data.")
        for name, value in (output.metrics or {}).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise VimeError(f"its metric {name} is {value!r}, allowed: a number.")
        return output

    def _answers(self, name: str, result: Mapping[str, Any]) -> list[EvalAnswer]:
        """Raises `VimeError` for lists that don't belong together."""
        rewards: Sequence[Any] = result["rewards"]
        samples = [copy(sample) for sample in result.get("samples") or [Sample() for _ in rewards]]
        truncated = result.get("truncated") or [sample.status is Sample.Status.TRUNCATED for sample in samples]
        if not len(rewards) == len(samples) == len(truncated):
            raise VimeError(
                f"data set {name} has {len(rewards)} rewards, {len(truncated)} truncated and {len(samples)} samples, "
                "allowed: equally many."
            )
        return [
            self._answer(name, number, sample, reward, is_truncated=bool(cut))
            for number, (sample, reward, cut) in enumerate(zip(samples, rewards, truncated, strict=True))
        ]

    def _answer(self, name: str, number: int, sample: Sample, reward: Any, *, is_truncated: bool) -> EvalAnswer:
        sample.group_index, attempt = divmod(number, self._attempts.get(name, 1))
        sample.reward = reward
        sample.status = Sample.Status.TRUNCATED if is_truncated else Sample.Status.COMPLETED
        error: RewardError | None = None
        try:
            reward_value(sample, None)
        except RewardError as fault:
            error = fault
        return answer_of(name, sample, attempt=attempt, source="", reward_key=None, error=error)
