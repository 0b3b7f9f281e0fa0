"""Rows from the engine's core to its API server: each request gets its own of each step, and others what vLLM gives."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vime.backends.vllm_utils.plugin import core_columns
from vime.backends.vllm_utils.plugin.columns import OPTION, ColumnRequest, Nuclei
from vime.backends.vllm_utils.plugin.core_columns import CoreColumns
from vime.backends.vllm_utils.plugin.received_columns import _PartProcessor, hand_out
from vime.backends.vllm_utils.plugin.request_columns import ReceivedColumns
from vime.backends.vllm_utils.plugin.step_extras import StepExtras, add_extras

WIDTH = 4
SCHEDULER = SimpleNamespace(requests={})
ROUTES = (2, 3)
"""Layers and experts of a token."""


@dataclass
class Made:
    """What a request's tokens should have, token by token."""

    rows: list[list[int]] = field(default_factory=list)
    nuclei: list[list[int]] = field(default_factory=list)
    routes: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)


class Engine:
    """A core whose steps sample as many tokens of each request as a test says, and an API server that reads its
    messages as vLLM encodes them."""

    def __init__(self, wanted: dict[str, ColumnRequest]) -> None:
        self.core = CoreColumns()
        self.processors: dict[str, Any] = {}
        self.made: dict[str, Made] = {}
        self.stock: dict[str, list[list[int]]] = {}
        self._next = 0
        for name, request in wanted.items():
            self.add(name, request)

    def add(self, name: str, wanted: ColumnRequest | None) -> None:
        """Begin a request; None asks for no columns."""
        self.made[name] = Made()
        extra = None if wanted is None else {OPTION: msgspec.to_builtins(wanted)}
        if wanted is not None:
            self.processors[name] = _PartProcessor(wanted)
        self.core.add(SimpleNamespace(request_id=name, sampling_params=SamplingParams(extra_args=extra)))

    def received(self, name: str) -> ReceivedColumns:
        columns: ReceivedColumns = self.processors[name].logprobs
        return columns

    def step(
        self,
        counts: dict[str, int],
        *,
        rows_each: int = 1,
        ended: Sequence[str] = (),
        order: int = 1,
        clients: int = 1,
        with_nuclei: bool = False,
        with_routes: bool = False,
        is_packed: bool = False,
        new_label: str | None = None,
    ) -> Any:
        """`order` -1 puts the outputs in another order than the batch; what the scheduler sees as log-probabilities.

        `new_label` is set while the step is in flight, so it isn't the step's.
        """
        names, label = list(counts), self.core.version
        scheduled = core_columns._labelled(lambda _: SimpleNamespace())(SimpleNamespace(vime_columns=self.core))
        if new_label is not None:
            self.core.version = new_label
        results, rows, nuclei = self._results(names, rows_each, with_nuclei=with_nuclei, is_packed=is_packed)
        self.core.begin_step(SCHEDULER, scheduled, results)
        outputs = []
        for index, name in list(enumerate(names))[::order]:
            first, count = index * rows_each, counts[name]
            made, tokens = self.made[name], rows[first : first + count]
            routes = np.random.default_rng(self._next + index).integers(0, 9, (count, *ROUTES)).astype(np.uint8)
            made.rows += tokens
            made.nuclei += nuclei[first : first + count]
            made.routes.append(routes)
            made.labels += [label] * count
            reason = FinishReason.LENGTH if name in ended else None
            if not count and reason is None:
                continue
            output = EngineCoreOutput(name, [row[0] for row in tokens], finish_reason=reason)
            if with_routes and count:
                output.routed_experts = routes
            if results.logprobs is not None:
                output.new_logprobs = results.logprobs.slice_request(index, count)
            outputs.append(output)
        batches = {client: EngineCoreOutputs(outputs=outputs[client::clients]) for client in range(clients)}
        self.core.end_step(SCHEDULER, batches)
        for batch in batches.values():
            self._receive(MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(batch)))
        return results.logprobs

    def abort(self, name: str) -> None:
        """Both sides end it."""
        core_columns._dropping(lambda *_: [SimpleNamespace(request_id=name)])(SimpleNamespace(vime_columns=self.core))
        self.processors.pop(name, None)

    def _results(
        self, names: list[str], rows_each: int, *, with_nuclei: bool, is_packed: bool
    ) -> tuple[Any, list[list[int]], list[list[int]]]:
        count = len(names) * rows_each
        whole = np.empty((count, 2 * WIDTH), np.int32)
        ids = whole[:, :WIDTH] if is_packed else np.empty((count, WIDTH), np.int64)
        log_probs = whole[:, WIDTH:].view(np.float32) if is_packed else np.empty((count, WIDTH), np.float32)
        ids[:] = np.arange(self._next, self._next + count * WIDTH).reshape(-1, WIDTH)
        log_probs[:] = -ids.astype(np.float32)
        self._next += count * WIDTH
        first_rows = None if rows_each == 1 else list(range(0, count, rows_each))
        found = LogprobsLists(ids, log_probs, ids[:, 0], first_rows)
        places = {name: index for index, name in enumerate(names)}
        results = SimpleNamespace(logprobs=found, req_ids=names, req_id_to_index=places)
        sizes = np.arange(self._next, self._next + count) % 4
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        members = np.arange(offsets[-1]).astype(np.int32) + self._next
        if with_nuclei:
            add_extras(results, StepExtras(nuclei=Nuclei(members, offsets, -members.astype(np.float32))))
        nuclei = [members[offsets[row] : offsets[row + 1]].tolist() for row in range(count)]
        return results, ids.tolist(), nuclei

    def _receive(self, message: EngineCoreOutputs) -> None:
        hand_out(message.outputs)
        for output in message.outputs:
            if output.request_id in self.processors:
                self.processors[output.request_id].update_from_output(output)
            elif output.new_logprobs is not None and isinstance(output.new_logprobs, LogprobsLists):
                self.stock.setdefault(output.request_id, []).extend(output.new_logprobs.logprob_token_ids.tolist())

    def check(self, name: str, *, with_nuclei: bool = False, with_routes: bool = False) -> None:
        """All columns of a request are those that were made for it."""
        received, made = self.received(name), self.made[name]
        columns, request = received.columns(), received.request
        rows = np.array(made.rows, np.int64).reshape(-1, WIDTH)
        width = request.num_candidates + 1
        np.testing.assert_array_equal(columns.sampled_ids, rows[:, 0])
        np.testing.assert_array_equal(columns.log_probs, -rows[:, 0].astype(np.float32))
        np.testing.assert_array_equal(columns.candidate_ids, rows[:, 1:width])
        np.testing.assert_array_equal(columns.candidate_log_probs, -rows[:, 1:width].astype(np.float32))
        assert [label for label, count in columns.versions for _ in range(count)] == made.labels
        if with_nuclei and request.nucleus:
            assert columns.nuclei is not None
            members = [token for nucleus in made.nuclei for token in nucleus]
            np.testing.assert_array_equal(columns.nuclei.ids, members)
            np.testing.assert_array_equal(columns.nuclei.log_probs, -np.array(members, np.float32))
            np.testing.assert_array_equal(np.diff(columns.nuclei.offsets), [len(nucleus) for nucleus in made.nuclei])
        if with_routes and request.routes_from is not None and made.rows:
            np.testing.assert_array_equal(columns.routes, np.concatenate(made.routes))
        else:
            assert columns.routes is None


@pytest.mark.parametrize("rows_each", [1, 3])
def test_each_request_gets_its_rows_whatever_the_order_of_outputs_and_what_was_accepted(rows_each: int) -> None:
    engine = Engine({"a": ColumnRequest(), "b": ColumnRequest(num_candidates=3), "c": ColumnRequest(num_candidates=1)})
    for number in range(80):
        counts = {"a": 1, "b": number % (rows_each + 1), "c": rows_each}
        assert engine.step(counts, rows_each=rows_each, order=-1 if number % 2 else 1) is None
    for name in "abc":
        engine.step({name: 1}, ended=[name])
        engine.check(name)
    assert not engine.core._requests


def any_request(rng: random.Random) -> ColumnRequest | None:
    if rng.random() < 0.2:
        return None
    return ColumnRequest(rng.randrange(WIDTH), rng.choice([None, 0]), rng.random() < 0.5)


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 2), st.booleans(), st.booleans(), st.booleans())
def test_columns_are_those_of_every_token_in_any_schedule(
    seed: int, rows_each: int, clients: int, with_nuclei: bool, with_routes: bool, is_packed: bool
) -> None:
    """Requests come, wait, sample none or several tokens in a step, change places, end and are aborted."""
    rng, engine, running, number = random.Random(seed), Engine({}), list[str](), itertools.count()
    has = {"with_nuclei": with_nuclei and rows_each == 1, "with_routes": with_routes}
    for _ in range(rng.randint(1, 8)):
        for _ in range(rng.randrange(3)):
            running.append(name := f"request-{next(number)}")
            engine.add(name, any_request(rng))
        if running and rng.random() < 0.1:
            engine.abort(running.pop(rng.randrange(len(running))))
        batch = rng.sample(running, rng.randint(0, len(running)))
        ended = [name for name in batch if rng.random() < 0.2]
        num_steps = rng.choice([1, 2, 70])  # some batches stay as they are for long
        for step in range(num_steps) if batch else ():
            engine.step(
                {name: rng.randint(1 if rows_each == 1 else 0, rows_each) for name in batch},
                rows_each=rows_each,
                ended=ended if step == num_steps - 1 else (),
                order=rng.choice([1, -1]),
                clients=clients,
                is_packed=is_packed,
                new_label=str(next(number)) if rng.random() < 0.1 else None,
                **has,
            )
        running = [name for name in running if name not in ended]
    for name in engine.processors:
        engine.check(name, **has)
    assert engine.core._requests.keys() == engine.processors.keys() & set(running)


def test_a_request_that_asks_for_no_columns_gets_what_vllm_gives_beside_others() -> None:
    engine = Engine({"a": ColumnRequest()})
    engine.add("other", None)
    seen = engine.step({"a": 1, "other": 1})
    assert seen.slice_request(0, 1) is None
    np.testing.assert_array_equal(seen.slice_request(1, 1).logprob_token_ids, [[4, 5, 6, 7]])
    assert engine.stock == {"other": [[4, 5, 6, 7]]}
    engine.step({"a": 1}, ended=["a"])
    engine.check("a")


def test_a_batch_without_columns_is_left_to_vllm() -> None:
    engine = Engine({})
    engine.add("other", None)
    assert isinstance(engine.step({"other": 1}), LogprobsLists)
    assert engine.stock == {"other": [[0, 1, 2, 3]]}


def test_a_request_that_takes_the_name_of_one_before_gets_what_it_asks_for() -> None:
    engine = Engine({"a": ColumnRequest(), "b": ColumnRequest()})
    engine.step({"a": 1, "b": 1})
    engine.abort("b")
    engine.add("b", None)
    engine.step({"a": 1, "b": 1})
    assert engine.stock == {"b": [[12, 13, 14, 15]]}
    engine.check("a")


def test_an_output_without_a_token_ends_a_request_with_the_rows_that_came() -> None:
    engine = Engine({"a": ColumnRequest(), "b": ColumnRequest()})
    for _ in range(5):
        engine.step({"a": 1, "b": 1})
    engine.step({"a": 0, "b": 1}, ended=["a"])
    engine.check("a")
    assert engine.core._requests.keys() == {"b"}


def test_requests_that_are_ended_from_outside_are_forgotten() -> None:
    engine = Engine({"a": ColumnRequest(), "b": ColumnRequest()})
    engine.step({"a": 1, "b": 1})
    engine.abort("a")
    engine.step({"b": 1})
    engine.check("b")
    assert engine.core._requests.keys() == {"b"}


def test_tokens_that_a_stop_text_cuts_off_keep_their_rows_until_the_columns_are_cut() -> None:
    engine = Engine({"a": ColumnRequest()})
    outputs: list[Any] = []
    engine.processors["a"] = SimpleNamespace(update_from_output=outputs.append)
    engine.step({"a": 3}, rows_each=3)
    (output,) = outputs
    del output.new_token_ids[1:]
    output.new_logprobs = output.new_logprobs.slice_request(0, 1)  # as vLLM 0.32 does
    received = ReceivedColumns(ColumnRequest())
    received.add(output.new_logprobs)
    assert received.num_rows == 3
    assert received.columns().head(1).sampled_ids.tolist() == [0]
