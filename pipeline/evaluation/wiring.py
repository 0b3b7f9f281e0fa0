"""From settings to an evaluator, and to what closes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from pipeline.evaluation.dumps import EvaluationDumps
from pipeline.evaluation.evaluator import EvaluatedSet, Evaluator, EvaluatorSettings
from pipeline.evaluation.keeper import ResultKeeper
from pipeline.evaluation.log_function import EvalLog
from pipeline.evaluation.own_function import OwnEvaluator, own_eval_function
from pipeline.evaluation.prompts import EvalSet, eval_sampling, open_eval_sets
from pipeline.generate_settings import request_seed_of
from pipeline.pool_wiring import open_pool_on_disk
from pipeline.producer_wiring import build_generator
from pipeline.request_gate import RequestGate
from pipeline.run_folder import RunFolder
from pipeline.sample_maker import MakerSettings, SampleMaker
from storage.pool import Pool
from vime.rollout.own_functions import OwnFunctions
from vime.rollout.own_generate import OwnGenerate
from vime.rollout.rewards import Rewards
from vime.rollout.sample_hooks import SampleHooks
from vime.settings.groups import Settings
from vime.settings.parse import HookArgs

AnyEvaluator = Evaluator | OwnEvaluator
Closer = Callable[[], Awaitable[None]]


def build_evaluator(
    settings: Settings, gate: RequestGate, num_engines: int, hook_args: HookArgs
) -> tuple[AnyEvaluator, list[Closer]] | None:
    """What evaluates, and what must be awaited to close what it uses; None without data sets."""
    opened, own = open_eval_sets(settings), own_eval_function(settings)
    if not opened:
        return None
    path, template = settings.logging.custom_eval_rollout_log_function_path, settings.debug.rollout_data_template
    keeper = ResultKeeper(
        RunFolder.of(settings).root,
        None if path is None else EvalLog(path, hook_args),
        None if template is None else EvaluationDumps(template, _pool_opener(settings)),
    )
    if own is None:
        return _built_in_evaluator(settings, opened, gate, num_engines, hook_args, keeper)
    attempts = {each.name: each.num_attempts for each in opened}
    stock = _BuiltInResults(lambda: _built_in_evaluator(settings, opened, gate, num_engines, hook_args, keeper))
    return OwnEvaluator(own, hook_args, attempts, keeper, stock), [stock.close]


class _BuiltInResults:
    """Results of vime's own evaluation, which is made when a function of the user's own asks for it first."""

    def __init__(self, build: Callable[[], tuple[Evaluator, list[Closer]]]) -> None:
        self._build = build
        self._built: tuple[Evaluator, list[Closer]] | None = None

    async def __call__(self) -> Mapping[str, Mapping[str, Any]]:
        if self._built is None:
            self._built = self._build()
        return await self._built[0].results()

    async def close(self) -> None:
        for close in [] if self._built is None else self._built[1]:
            await close()


def _pool_opener(settings: Settings) -> Callable[[], Pool] | None:
    return None if settings.queue.is_in_memory else partial(open_pool_on_disk, settings)


def _built_in_evaluator(
    settings: Settings,
    opened: list[EvalSet],
    gate: RequestGate,
    num_engines: int,
    hook_args: HookArgs,
    keeper: ResultKeeper,
) -> tuple[Evaluator, list[Closer]]:
    """vime's own, which asks through `gate`.

    Rewards are apart from those of training, so that neither waits for the other's graders.
    """
    rewards = _rewards(settings, opened)
    sets = [
        EvaluatedSet(
            prompts=each,
            sampling=eval_sampling(each.options, settings, request_seed_of(settings)),
            reward=rewards[_reward_name(each)].of_sample,
            reward_key=each.options.reward_key,
        )
        for each in opened
    ]
    rollout = settings.rollout
    functions = OwnFunctions()
    maker = SampleMaker(
        MakerSettings(
            sampling=sets[0].sampling,
            reward_timeout_s=rollout.reward_timeout,
            reward_key=None,
            salt_by_version=settings.weights.prefix_cache_salt == "version",
        ),
        gate,
        build_generator(settings),
        None,
        hook_args,
        own=OwnGenerate(functions, hook_args),
        hooks=SampleHooks(functions, hook_args, rollout.rollout_sample_hook_path),
    )
    evaluator = Evaluator(
        EvaluatorSettings(
            max_requests=rollout.vllm_server_concurrency * max(1, num_engines),
            max_attempts=rollout.rollout_max_attempts,
            reward_timeout_s=rollout.reward_timeout,
        ),
        sets,
        maker,
        hook_args,
        keeper,
    )

    async def close_functions() -> None:
        functions.close()

    return evaluator, [close_functions, *(each.close for each in rewards.values())]


def _rewards(settings: Settings, sets: list[EvalSet]) -> dict[tuple[str | None, str | None], Rewards]:
    """One for each reward that a data set names."""
    return {
        (rm_type, path): Rewards(
            dataclasses.replace(
                settings, rollout=dataclasses.replace(settings.rollout, rm_type=rm_type, custom_rm_path=path)
            )
        )
        for rm_type, path in {_reward_name(each) for each in sets}
    }


def _reward_name(each: EvalSet) -> tuple[str | None, str | None]:
    return each.options.rm_type, each.options.custom_rm_path
