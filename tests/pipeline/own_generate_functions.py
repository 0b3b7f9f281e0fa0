"""Generate functions and hooks as users write them, for the tests of the stream."""
# ruff: noqa: ARG001 - the documented signatures

from __future__ import annotations

import copy
import time
from typing import Any

from tests.pipeline.stream_parts import CharTokenizer
from vime.rollout.turns import Turns
from vime.rollout.vllm_rollout import generate, generate_in_pieces
from vime.utils.types import Sample

TOOL_TOKENS = [7, 8, 9]
PIECES: list[list[tuple[int, int]]] = []
"""Of each call of `leaving_early`, tokens and characters of the response when it saw them."""
FAILED: set[int | None] = set()
"""Samples whose first attempt `failing_once` ended."""


async def two_turns(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Two answers of the model with a tool's between them; goes on where it was aborted."""
    turn = {**sampling_params, "max_new_tokens": 5}
    if sample.response_length < 5:
        sample = await generate(args, sample, turn)
        if sample.status is Sample.Status.ABORTED:
            return sample
    if sample.response_length == 5:
        sample.append_response_tokens(args, TOOL_TOKENS, trainable=False)
    return await generate(args, sample, {**sampling_params, "max_new_tokens": 13})


async def three_turns(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Three answers of the model with a tool's between them; what was sampled is noted in the metadata."""
    turns = Turns(CharTokenizer())
    for turn in range(3):
        if turn:
            reply = turns.reply(sample, [{"role": "tool", "content": "tool says"}])
            sample.append_response_tokens(args, reply, trainable=False)
        start = len(sample.tokens) or len(turns.prompt(sample.prompt))
        await generate(args, sample, {**sampling_params, "max_new_tokens": sample.response_length + 5})
        sample.metadata.setdefault("sampled", []).extend(sample.tokens[start:])
    return sample


async def two_segments(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """A rollout whose context is begun anew in its middle."""
    second = copy.deepcopy(sample)
    return [await generate(args, sample, sampling_params), await generate(args, second, sampling_params)]


async def leaving_early(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Looks at the answer while it is made, ends it, and has the model go on after a tool's tokens."""
    seen: list[tuple[int, int]] = []
    PIECES.append(seen)
    async for piece in generate_in_pieces(args, sample, sampling_params):
        seen.append((piece.response_length, len(piece.response)))
        if piece.response_length >= 10:
            break
    sample.append_response_tokens(args, TOOL_TOKENS, trainable=False)
    return await generate(args, sample, {**sampling_params, "max_new_tokens": sample.response_length + 2})


async def retokenising(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Replaces a token that the engine sampled, in group 0."""
    await generate(args, sample, sampling_params)
    if sample.group_index == 0:
        sample.tokens = [*sample.tokens[:-2], (sample.tokens[-2] + 1) % 40, sample.tokens[-1]]
    return sample


async def blocking(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Holds up its event loop, as a tool without a coroutine does."""
    time.sleep(0.4)
    return await generate(args, sample, sampling_params)


async def raising(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    if sample.group_index == 0:
        raise KeyError("no such tool")
    return await generate(args, sample, sampling_params)


async def failing_once(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.metadata["attempts"] = sample.metadata.get("attempts", 0) + 1
    if sample.index not in FAILED:
        FAILED.add(sample.index)
        raise KeyError("no such tool")
    return await generate(args, sample, sampling_params)


async def returning_text(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    return "text" if sample.group_index == 0 else await generate(args, sample, sampling_params)


async def hotter(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    changed = {**sampling_params, "temperature": 2.0} if sample.group_index == 0 else sampling_params
    return await generate(args, sample, changed)


async def evaluating(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    sample.metadata["evaluation"] = evaluation
    return await generate(args, sample, sampling_params)


def count_calls(args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    """A hook that changes the sample."""
    assert sample.reward is None
    sample.metadata["hooks"] = [*sample.metadata.get("hooks", []), "count"]


async def replace_sample(
    args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False
) -> Sample:
    """A hook that returns another sample."""
    other = copy.deepcopy(sample)
    other.metadata["hooks"] = [*other.metadata.get("hooks", []), "replaced"]
    return other


def odd_hook(args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False) -> Any:
    return 5 if sample.group_index == 0 else None
