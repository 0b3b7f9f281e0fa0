"""Filters as users write them, for the tests of the stream."""
# ruff: noqa: ARG001 - the documented signatures

from __future__ import annotations

from typing import Any

from vime.rollout.filter_hub.base_types import DynamicFilterOutput
from vime.utils.types import Sample


def drop_odd_groups(args: Any, samples: list[Sample], **_: Any) -> DynamicFilterOutput:
    return DynamicFilterOutput(keep=(samples[0].group_index or 0) % 2 == 0, reason="odd")


def refuse_all(args: Any, samples: list[Sample], **_: Any) -> bool:
    return False


def fail_on_the_first(args: Any, samples: list[Sample], **_: Any) -> Any:
    return "yes" if samples[0].group_index == 0 else True
