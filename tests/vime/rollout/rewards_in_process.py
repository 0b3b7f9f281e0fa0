"""Plain reward functions, for the processes of the grader pool."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from vime.utils.types import Sample


def hangs(args: Any, sample: Sample) -> float:  # noqa: ARG001
    while True:
        pass


def eats_memory(args: Any, sample: Sample) -> float:  # noqa: ARG001
    return float(len(bytearray(2**40)))


def dies(args: Any, sample: Sample) -> float:  # noqa: ARG001
    os._exit(3)


def raises(args: Any, sample: Sample) -> float:  # noqa: ARG001
    raise KeyError("no such thing")


def returns_odd_thing(args: Any, sample: Sample) -> object:  # noqa: ARG001
    return object()


def annotates(args: Any, sample: Sample) -> float:
    sample.metadata["process"] = os.getpid()
    return float(args.rollout_temperature)


async def waits(args: Any, sample: Sample) -> float:  # noqa: ARG001
    await asyncio.sleep(0)
    return 1.0


def by_length(args: Any, samples: list[Sample]) -> list[float]:  # noqa: ARG001
    return [float(len(sample.response)) for sample in samples]


def by_label(args: Any, sample: Sample) -> float:
    """Misbehaves as the label says."""
    misbehaving = {"hang": hangs, "eat": eats_memory, "die": dies, "raise": raises}
    return misbehaving[sample.label](args, sample) if sample.label in misbehaving else 1.0
