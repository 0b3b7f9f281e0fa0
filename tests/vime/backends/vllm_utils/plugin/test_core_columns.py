"""Rows in the engine's core: each request gets its own of each step, and others what vLLM gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.outputs import LogprobsLists

from vime.backends.vllm_utils.plugin.columns import ColumnRequest, Pending, ReceivedColumns
from vime.backends.vllm_utils.plugin.core_columns import CoreColumns

WIDTH = 4
SCHEDULER = SimpleNamespace(requests={})


class Engine:
    """A core whose steps sample as many tokens of each request as a test says."""

    def __init__(self, wanted: dict[str, ColumnRequest]) -> None:
        self.core = CoreColumns()
        self.received = {name: ReceivedColumns(request) for name, request in wanted.items()}
        self.stock: list[Any] = []
        self.made: dict[str, list[list[int]]] = {}
        for number, (name, request) in enumerate(wanted.items()):
            self.core._pending[name] = Pending.start(request, number)
        self._next = 0

    def step(self, counts: dict[str, int], *, rows_each: int = 1, ended: str = "", order: int = 1) -> Any:
        """`order` -1 puts the outputs in another order than the batch; what the scheduler sees as log-probabilities."""
        names = list(counts)
        ids = np.arange(self._next, self._next + len(names) * rows_each * WIDTH).reshape(-1, WIDTH)
        self._next += ids.size
        first_rows = None if rows_each == 1 else list(range(0, len(ids), rows_each))
        found = LogprobsLists(ids, -ids.astype(np.float32), ids[:, 0], first_rows)
        places = {name: index for index, name in enumerate(names)}
        results = SimpleNamespace(logprobs=found, req_ids=names, req_id_to_index=places)
        self.core.begin_step(SCHEDULER, SimpleNamespace(), results)
        outputs = []
        for index, name in list(enumerate(names))[::order]:
            count = counts[name]
            first = index * rows_each
            self.made.setdefault(name, []).extend(ids[first : first + count].tolist())
            if count or name == ended:
                reason = "length" if name == ended else None
                output = SimpleNamespace(request_id=name, new_token_ids=list(range(count)), finish_reason=reason)
                outputs.append(SimpleNamespace(**vars(output), routed_experts=None, new_logprobs=None))
        self.core.end_step(
            SCHEDULER, {0: SimpleNamespace(outputs=outputs[:1]), 1: SimpleNamespace(outputs=outputs[1:])}
        )
        for output in outputs:
            if output.new_logprobs is not None:
                self.received[output.request_id].add(output.new_logprobs.logprob_token_ids.data)
        return results.logprobs


@pytest.mark.parametrize("rows_each", [1, 3])
def test_each_request_gets_its_rows_whatever_the_order_of_outputs_and_what_was_accepted(rows_each: int) -> None:
    engine = Engine({"a": ColumnRequest(), "b": ColumnRequest(num_candidates=3), "c": ColumnRequest(num_candidates=1)})
    for number in range(80):
        counts = {"a": 1, "b": number % (rows_each + 1), "c": rows_each}
        assert engine.step(counts, rows_each=rows_each, order=-1 if number % 2 else 1) is None
    for name in "abc":
        engine.step({name: 1}, ended=name)
    for name, received in engine.received.items():
        columns, made = received.columns(), np.array(engine.made[name])
        width = received.request.num_candidates + 1
        np.testing.assert_array_equal(columns.sampled_ids, made[:, 0])
        np.testing.assert_array_equal(columns.log_probs, -made[:, 0].astype(np.float32))
        np.testing.assert_array_equal(columns.candidate_ids, made[:, 1:width])
        np.testing.assert_array_equal(columns.candidate_log_probs, -made[:, 1:width].astype(np.float32))


def test_a_request_that_asks_for_no_columns_gets_what_vllm_gives_beside_others() -> None:
    engine = Engine({"a": ColumnRequest()})
    seen = engine.step({"a": 1, "other": 1})
    assert seen.slice_request(0, 1) is None
    np.testing.assert_array_equal(seen.slice_request(1, 1).logprob_token_ids, [[4, 5, 6, 7]])
    engine.step({"a": 1}, ended="a")
    np.testing.assert_array_equal(engine.received["a"].columns().sampled_ids, [0, 8])


def test_an_output_without_a_token_brings_the_rows_that_were_held() -> None:
    engine = Engine({"a": ColumnRequest(), "b": ColumnRequest()})
    for _ in range(5):
        engine.step({"a": 1, "b": 1})
    engine.step({"a": 0, "b": 1}, ended="a")
    assert engine.received["a"].num_rows == 5
    assert engine.core._pending.keys() == {"b"}
