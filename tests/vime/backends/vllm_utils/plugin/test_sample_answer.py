"""Answers and streams of requests whose rows and tokens don't agree."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vime.backends.vllm_utils.plugin.columns import ColumnRequest
from vime.backends.vllm_utils.plugin.request_columns import ReceivedColumns
from vime.backends.vllm_utils.plugin.sample_route import SampleRoute
from vime.backends.vllm_utils.plugin.step_columns import ReceivedStep, StepColumns, StepPart, pack_rows
from vime.backends.vllm_utils.plugin.stream_route import StreamRoute
from vime.backends.vllm_utils.wire_columns import SampleAbilities, SampleCall

CALL = SampleCall("a", np.array([1, 2], "<i4").tobytes(), {"max_tokens": 3})


class Engine:
    """Samples some tokens; rows came of others."""

    def __init__(self, sampled: list[int], with_rows: list[int]) -> None:
        self._sampled, self._with_rows = sampled, with_rows

    async def generate(self, _prompt: Any, _parameters: Any, _request_id: str) -> AsyncIterator[Any]:
        received = ReceivedColumns(ColumnRequest())
        for token in self._with_rows:
            rows = pack_rows(np.array([[token]]), np.array([[-1.0]]))
            received.add(StepPart(ReceivedStep(rows, StepColumns("v", np.int32(0).tobytes()).encode()), 0, 1))
        output = SimpleNamespace(token_ids=self._sampled, logprobs=received, finish_reason="length")
        yield SimpleNamespace(outputs=[output], prompt_token_ids=[1, 2], num_cached_tokens=0)


def route(engine: Engine) -> SampleRoute:
    return SampleRoute(engine, SampleAbilities(max_candidates=0, routes=False, nucleus=False, keeps_version=False))


async def test_rows_of_tokens_that_a_stop_text_cut_off_are_left_out() -> None:
    answer = await route(Engine([5, 6], [5, 6, 7])).sample(CALL)
    assert np.frombuffer(answer.token_ids, "<i4").tolist() == [5, 6]
    assert len(answer.log_probs) == 8
    assert [(span.version, span.start, span.stop) for span in answer.spans] == [("v", 0, 2)]


@pytest.mark.parametrize("with_rows", [[5, 6], [5, 7], [6, 7], []])
async def test_an_answer_whose_rows_were_lost_is_no_shorter_answer(with_rows: list[int]) -> None:
    with pytest.raises(RuntimeError, match="Request a"):
        await route(Engine([5, 6, 7], with_rows)).sample(CALL)


async def test_a_stream_whose_rows_were_lost_does_not_end_early_as_if_it_were_whole() -> None:
    with pytest.raises(RuntimeError, match="Request a: 1 sampled tokens lack rows"):
        _ = [piece async for piece in StreamRoute(Engine([5, 6, 7], [5, 6])).pieces(CALL)]
