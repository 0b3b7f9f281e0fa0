"""The generate function of the `multi_turn_tool` example: the model speaks, the calculator answers, until it is done.

Tokens are only ever appended: those of the model as the engine sampled them, those of the tool with a loss mask of 0.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

from transformers import AutoTokenizer

from examples.multi_turn_tool.calculator import CALL_END, answer, is_call
from vime.rollout.turns import Turns
from vime.rollout.vllm_rollout import generate
from vime.utils.types import Sample

MAX_CALLS = 2


@cache
def _tokenizer(path: str) -> Any:
    return AutoTokenizer.from_pretrained(path)


async def converse(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One conversation. One that was aborted goes on in the turn that it was in."""
    tokenizer = _tokenizer(args.hf_checkpoint)
    turns = Turns(tokenizer)
    if not sample.tokens:
        sample.tokens = turns.prompt(sample.prompt)
    asked = {**sampling_params, "stop_token_ids": tokenizer.encode(CALL_END, add_special_tokens=False)}
    while True:
        sample = await generate(args, sample, asked)
        turn = tokenizer.decode(last_turn(sample), skip_special_tokens=True)
        is_over = sample.status is not Sample.Status.COMPLETED or not is_call(turn)
        if is_over or num_replies(sample) == MAX_CALLS:
            return sample
        reply = turns.reply(sample, [{"role": "tool", "content": answer(turn)}])
        sample.append_response_tokens(args, reply, trainable=False)


def last_turn(sample: Sample) -> list[int]:
    """The tokens that the model said since the tool spoke."""
    mask = sample.loss_mask or []
    length = next((count for count, trained in enumerate(reversed(mask)) if not trained), len(mask))
    return sample.tokens[len(sample.tokens) - length :]


def num_replies(sample: Sample) -> int:
    """How often the tool has spoken."""
    mask = sample.loss_mask or []
    return sum(before and not after for before, after in itertools.pairwise(mask))
