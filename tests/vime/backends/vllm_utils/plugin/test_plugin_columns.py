"""Rows on their way from an engine's core to its API server: what is packed comes out again, whatever the blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.backends.vllm_utils.plugin.columns import (
    OPTION,
    ROWS_PER_BLOCK,
    ColumnRequest,
    Columns,
    Nuclei,
    Pending,
    ReceivedColumns,
    StepRows,
    column_request,
)

WIDTH = 6
"""Sampled token and candidates of the widest request in a batch."""


class Parameters:
    def __init__(self, extra_args: dict[str, object] | None) -> None:
        self.extra_args = extra_args


def received(request: ColumnRequest, blocks: list[Any]) -> ReceivedColumns:
    columns = ReceivedColumns(request)
    for block in blocks:
        columns.add(block)
    return columns


def step(
    rng: np.random.Generator, num_requests: int, rows_each: int = 1, *, is_packed: bool = False
) -> tuple[StepRows, dict[str, np.ndarray]]:
    """One step of a batch, and the arrays that it was made of: of one memory, as the GPU packs them, or of two."""
    count = num_requests * rows_each
    whole = np.empty((count, 2 * WIDTH), np.int32)
    ids = whole[:, :WIDTH] if is_packed else np.empty((count, WIDTH), np.int64)
    log_probs = whole[:, WIDTH:].view(np.float32) if is_packed else np.empty((count, WIDTH), np.float32)
    ids[:] = rng.integers(0, 1000, (count, WIDTH))
    log_probs[:] = -np.sort(rng.random((count, WIDTH)), axis=1)
    sizes = rng.integers(0, 4, count)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    nuclei = Nuclei(rng.integers(0, 1000, offsets[-1]).astype(np.int32), offsets, rng.random(offsets[-1], np.float32))
    first_rows = None if rows_each == 1 else list(range(0, count, rows_each))
    parts = {"ids": ids, "log_probs": log_probs, "sizes": sizes, "nucleus_ids": nuclei.ids, "offsets": offsets}
    return StepRows(ids, log_probs, first_rows, nuclei), parts


def run(
    request: ColumnRequest, num_steps: int, number: int, rows_each: int = 1, *, is_packed: bool = False
) -> tuple[Columns, list[int], list[Any]]:
    """Columns of a request that is the second of three in a batch, its rows per block, and what the steps held."""
    rng = np.random.default_rng(number)
    pending, blocks, sizes, held = Pending.start(request, number), [], [], []
    for _ in range(num_steps):
        rows, parts = step(rng, 3, rows_each, is_packed=is_packed)
        rows.add_to(pending, 1, rows_each)
        held.append(parts)
        if pending.is_due:
            sizes.append(pending.num_rows)
            blocks.append(pending.take("1"))
    if (last := pending.take("1")) is not None:
        blocks.append(last)
    return received(request, blocks).columns(), sizes, held


@given(st.integers(0, WIDTH - 1), st.integers(1, 200), st.integers(0, 300), st.integers(1, 2), st.booleans())
def test_every_row_arrives_in_order_whatever_the_blocks(
    k: int, num_steps: int, number: int, rows_each: int, is_packed: bool
) -> None:
    request = ColumnRequest(num_candidates=k, nucleus=True)
    columns, _, held = run(request, num_steps, number, rows_each, is_packed=is_packed)
    own = slice(rows_each, 2 * rows_each)
    ids = np.concatenate([parts["ids"][own] for parts in held])
    log_probs = np.concatenate([parts["log_probs"][own] for parts in held])
    assert len(columns) == num_steps * rows_each
    np.testing.assert_array_equal(columns.sampled_ids, ids[:, 0])
    np.testing.assert_array_equal(columns.log_probs, log_probs[:, 0])
    np.testing.assert_array_equal(columns.candidate_ids, ids[:, 1 : k + 1])
    np.testing.assert_array_equal(columns.candidate_log_probs, log_probs[:, 1 : k + 1])
    assert columns.nuclei is not None
    np.testing.assert_array_equal(np.diff(columns.nuclei.offsets), np.concatenate([p["sizes"][own] for p in held]))
    expected = [p["nucleus_ids"][p["offsets"][rows_each] : p["offsets"][2 * rows_each]] for p in held]
    np.testing.assert_array_equal(columns.nuclei.ids, np.concatenate(expected))


def test_requests_of_one_batch_send_their_blocks_in_different_steps() -> None:
    firsts = [run(ColumnRequest(), ROWS_PER_BLOCK, number)[1][0] for number in range(ROWS_PER_BLOCK)]
    assert sorted(firsts) == list(range(1, ROWS_PER_BLOCK + 1))
    assert set(run(ColumnRequest(), 500, 3)[1][1:]) == {ROWS_PER_BLOCK}


def test_an_answer_that_was_cut_short_loses_the_same_tokens_of_every_column() -> None:
    request = ColumnRequest(num_candidates=2, routes_from=0, nucleus=True)
    pending = Pending.start(request, 0)
    pending.routes.append(np.arange(13 * 2 * 3, dtype=np.uint8).reshape(13, 2, 3))  # 4 prompt tokens
    for _ in range(10):
        step(np.random.default_rng(1), 3)[0].add_to(pending, 0, 1)
    whole = received(request, [pending.take("1")]).columns()
    cut = whole.head(7)
    assert len(cut) == len(cut.log_probs) == len(cut.candidate_ids) == len(cut.candidate_log_probs) == 7
    assert cut.nuclei is not None
    assert len(cut.nuclei.offsets) == 8
    assert cut.nuclei.offsets[-1] == len(cut.nuclei.ids) == len(cut.nuclei.log_probs)
    assert cut.routes is not None
    assert whole.routes is not None
    np.testing.assert_array_equal(cut.routes, whole.routes[:10])


def test_rows_that_the_gpu_packed_are_taken_as_they_lie() -> None:
    whole = np.arange(12, dtype=np.int32).reshape(3, 4)
    packed = StepRows(whole[:, :2], whole[:, 2:].view(np.float32))._pack(1)
    assert np.shares_memory(np.frombuffer(packed, np.int32), whole)
    assert bytes(packed) == whole.tobytes()


def test_every_token_keeps_the_label_of_the_weights_that_made_it_across_blocks() -> None:
    pending, blocks = Pending.start(ColumnRequest(), 0), []
    for number in range(100):
        if number % 30 == 0 and number:
            pending.label(str(number // 30 - 1))
        step(np.random.default_rng(number), 1)[0].add_to(pending, 0, 1)
        if pending.is_due:
            blocks.append(pending.take(str(number // 30)))
    columns = received(ColumnRequest(), [*blocks, pending.take("3")])
    assert columns.versions == [("0", 30), ("1", 30), ("2", 30), ("3", 10)]
    assert columns.piece(58, 61)[2] == ["1", "1", "2"]


def test_a_stream_reads_rows_between_the_blocks_that_come() -> None:
    pending, columns, tokens = Pending.start(ColumnRequest(), 0), ReceivedColumns(ColumnRequest()), []
    for number in range(3):
        rows, parts = step(np.random.default_rng(number), 1)
        rows.add_to(pending, 0, 1)
        columns.add(pending.take("1"))
        found = columns.piece(number, number + 1)
        assert found == (parts["ids"][:, 0].tolist(), parts["log_probs"][:, 0].tolist(), ["1"])
        tokens += found[0]
    assert columns.columns().sampled_ids.tolist() == tokens


def test_a_request_without_rows_sends_nothing() -> None:
    pending = Pending.start(ColumnRequest(), 0)
    assert pending.take("1") is None
    assert len(ReceivedColumns(ColumnRequest(num_candidates=3, nucleus=True)).columns().candidate_ids) == 0


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}])
def test_only_requests_that_ask_get_columns(extra: dict[str, object] | None) -> None:
    assert column_request(Parameters(extra)) is None
    assert column_request(None) is None
    assert column_request(Parameters({OPTION: {"num_candidates": 3}})) == ColumnRequest(num_candidates=3)
