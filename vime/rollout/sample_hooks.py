"""--rollout-sample-hook-path: what the user's functions do to each sample before its reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vime.errors import SampleError
from vime.rollout.own_functions import OwnFunctions
from vime.utils.types import Sample

FLAG = "--rollout-sample-hook-path"


class SampleHooks:
    """Calls `f(args, sample, *, rollout_id=None, evaluation=False)`, sync or async, one after the other."""

    def __init__(self, functions: OwnFunctions, args: Any, paths: Sequence[str]) -> None:
        self._functions, self._args, self._paths = functions, args, paths

    async def __call__(self, sample: Sample, *, evaluation: bool) -> Sample:
        """The sample, or what the hooks returned in its place. Raises `SampleError`."""
        for path in self._paths:
            where = f"sample {sample.index} of group {sample.group_index}"
            answer = await self._functions.call(
                FLAG, path, where, "sample_hook_raised", self._args, sample, rollout_id=None, evaluation=evaluation
            )
            if answer is not None and not isinstance(answer, Sample):
                raise SampleError(
                    f"{where}: {FLAG} {path} returned a {type(answer).__name__}, allowed: a Sample or None.",
                    reason="sample_hook_answer",
                )
            sample = answer or sample
        return sample
