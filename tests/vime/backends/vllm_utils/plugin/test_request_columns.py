"""Columns of one request as the API server keeps them."""

from __future__ import annotations

import numpy as np

from vime.backends.vllm_utils.plugin.columns import ColumnRequest
from vime.backends.vllm_utils.plugin.request_columns import ROWS_AT_ONCE, ReceivedColumns
from vime.backends.vllm_utils.plugin.step_columns import ReceivedStep, StepColumns, StepPart, pack_rows


def part(token: int, label: str = "1") -> StepPart:
    """Of a step that sampled one token of one request."""
    rows = pack_rows(np.array([[token]]), np.array([[-float(token)]]))
    return StepPart(ReceivedStep(rows, StepColumns(label, np.int32(0).tobytes()).encode()), 0, 1)


def test_every_token_keeps_the_label_of_the_weights_that_made_it() -> None:
    received = ReceivedColumns(ColumnRequest())
    for number in range(100):
        received.add(part(number, str(number // 30)))
    assert received.piece(58, 61)[2] == ["1", "1", "2"]
    assert received.columns().versions == [("0", 30), ("1", 30), ("2", 30), ("3", 10)]


def test_a_stream_reads_rows_between_the_steps_that_come() -> None:
    received = ReceivedColumns(ColumnRequest())
    for number in range(ROWS_AT_ONCE + 5):
        received.add(part(number))
        assert received.piece(number, number + 1) == ([number], [-float(number)], ["1"])
    assert received.columns().sampled_ids.tolist() == list(range(ROWS_AT_ONCE + 5))


def test_a_request_without_rows_has_empty_columns() -> None:
    columns = ReceivedColumns(ColumnRequest(num_candidates=3, nucleus=True)).columns()
    assert columns.candidate_ids.shape == (0, 3)
    assert columns.versions == []
    assert columns.nuclei is not None
    assert columns.nuclei.offsets.tolist() == [0]
