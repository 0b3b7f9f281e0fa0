"""--dynamic-sampling-filter-path: which groups are worth training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.errors import SampleError
from vime.rollout.filter_hub.base_types import DynamicFilterOutput
from vime.rollout.own_functions import OwnFunctions
from vime.utils.types import Sample

FLAG = "--dynamic-sampling-filter-path"
_REJECTED = "filter_"
_NO_REASON = "rejected"


class DynamicFilter:
    """Calls `f(args, samples)`."""

    def __init__(self, functions: OwnFunctions, args: Any, path: str | None) -> None:
        """Without `path` every group is kept."""
        self._functions, self._args, self._path = functions, args, path

    async def judge(self, samples: list[Sample]) -> DynamicFilterOutput:
        """What the filter says of a group; a rejected one has a reason. Raises `SampleError`."""
        if self._path is None:
            return DynamicFilterOutput(keep=True)
        where = f"group {samples[0].group_index}"
        answer = await self._functions.call(FLAG, self._path, where, "failing_filter", self._args, samples)
        if isinstance(answer, bool):
            answer = DynamicFilterOutput(keep=answer)
        if not isinstance(answer, DynamicFilterOutput):
            raise SampleError(
                f"{where}: {FLAG} returned a {type(answer).__name__}, allowed: DynamicFilterOutput or bool.",
                reason="failing_filter",
            )
        return answer


def rejection(output: DynamicFilterOutput) -> str:
    """The word under which the queue counts a rejected group."""
    return f"{_REJECTED}{output.reason or _NO_REASON}"


def without_rejections(dropped: Mapping[str, int]) -> dict[str, int]:
    """The groups that were set aside because something failed (reason -> groups), out of all that were."""
    return {reason: count for reason, count in dropped.items() if not reason.startswith(_REJECTED)}
