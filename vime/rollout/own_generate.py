"""--custom-generate-function-path: samples from functions of the user's own."""

from __future__ import annotations

import asyncio
from typing import Any

from vime.errors import GenerationAborted, SampleError
from vime.rollout.own_functions import OwnFunctions, loaded, takes
from vime.rollout.sample_call import Ask, SampleCall, bind
from vime.rollout.sampling import SamplingSettings
from vime.utils.types import Sample

FLAG = "--custom-generate-function-path"


class OwnGenerate:
    """Calls `async f(args, sample, sampling_params[, evaluation])`, any number at once."""

    def __init__(self, functions: OwnFunctions, args: Any) -> None:
        self._functions, self._args = functions, args
        self.num_drifted_tokens = 0
        """Tokens that a function replaced after an engine had sampled them; their samples are set aside."""

    async def generate(
        self, path: str, sample: Sample, sampling: SamplingSettings, ask: Ask, *, evaluation: bool
    ) -> list[Sample]:
        """What the function makes of a sample: that one, or the segments of its rollout, which share a `rollout_id`.

        `ask` makes the engine requests of `vime.rollout.vllm_rollout.generate`.

        Raises:
            GenerationAborted: a request was aborted; `sample` has what the function had put into it.
            EngineError: an engine failed.
            SampleError: the function raised, or returned something else; its `reason` says which.
        """
        where = f"sample {sample.index} of group {sample.group_index}"
        function = loaded(FLAG, path, where, "generate_raised")
        call = SampleCall(ask, asyncio.get_running_loop(), sampling, evaluation)

        async def called() -> Any:
            bind(call)
            keywords = {"evaluation": evaluation} if takes(function, "evaluation") else {}
            return await function(self._args, sample, sampling.for_hooks(), **keywords)

        try:
            answer = await self._functions.run(called(), f"{FLAG} {path}", where, "generate_raised")
        finally:
            call.end_streams()
        samples = _segments(answer, sample, where)
        if any(segment.status is Sample.Status.ABORTED for segment in samples):
            if len(samples) == 1 and samples[0] is not sample:
                vars(sample).update(vars(samples[0]))
            raise GenerationAborted(f"{where}: aborted after {sample.response_length} tokens")
        self._refuse_drift(call, where)
        return samples

    def _refuse_drift(self, call: SampleCall, where: str) -> None:
        drifted = call.num_drifted()
        self.num_drifted_tokens += drifted
        if drifted:
            raise SampleError(
                f"{where}: {drifted} of the tokens that the engine sampled are others now, allowed: 0.",
                next_step="Append to sample.tokens what the engine and the tools said; don't tokenise the text again.",
                reason="retokenised",
            )


def _segments(answer: Any, sample: Sample, where: str) -> list[Sample]:
    """The samples of an answer, each with group, index and rollout. Raises `SampleError`."""
    samples = list(answer) if isinstance(answer, list | tuple) else [answer]
    if not samples or not all(isinstance(segment, Sample) for segment in samples):
        found = "an empty list" if not samples else f"a {type(answer).__name__}"
        raise SampleError(
            f"{where}: {FLAG} returned {found}, allowed: a Sample or a list of Samples.", reason="generate_answer"
        )
    for segment in samples:
        segment.group_index = sample.group_index
        segment.index = sample.index if segment.index is None else segment.index
        if segment.status is Sample.Status.FAILED:
            raise SampleError(f"{where}: the generate function says that it failed.", reason="generate_failed")
    rollout_ids = {segment.rollout_id for segment in samples}
    if rollout_ids == {None} and len(samples) > 1:
        rollout_ids = {sample.index}
    if len(rollout_ids) > 1:
        raise SampleError(
            f"{where}: its segments have the rollout ids {sorted(map(str, rollout_ids))}, allowed: one for all.",
            reason="rollout_id",
        )
    for segment in samples:
        segment.rollout_id = rollout_ids.copy().pop()
    return samples
