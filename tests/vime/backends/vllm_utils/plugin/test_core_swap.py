"""A change of weights between two steps, in the engine's core: labels of steps in flight, and what a failure leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm.v1.core.sched.interface import PauseState

from vime.backends.vllm_utils.plugin import core_columns, core_swap
from vime.backends.vllm_utils.plugin.columns import ColumnRequest
from vime.backends.vllm_utils.plugin.core_columns import CoreColumns
from vime.backends.vllm_utils.plugin.core_swap import SWAP_SECONDS, SWAP_WEIGHTS
from vime.backends.vllm_utils.plugin.received_columns import hand_out
from vime.backends.vllm_utils.plugin.request_columns import ReceivedColumns
from vime.backends.vllm_utils.plugin.weight_engine import VimeUpdate, VimeWeightEngine
from vime.backends.vllm_utils.updates import LoadShared, LoadStream
from vime.errors import PublicationError


class Core:
    """As much of vLLM's `EngineCore` as a swap needs, with a worker that may fail."""

    def __init__(self, *, fails: bool = False) -> None:
        self.said: list[tuple[str, tuple[Any, ...]]] = []
        self.copy_s: list[float | None] = [0.25, 0.5]
        self._fails = fails
        self.model_executor = self
        self.scheduler = SimpleNamespace(vime_columns=CoreColumns(), set_pause_state=self._pause)
        self.pause_state = PauseState.UNPAUSED
        self.vllm_label = ""

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.said.append((method, args))
        if self._fails:
            raise PublicationError("parts of it have not come")
        return list(self.copy_s)

    def set_weight_version(self, label: str) -> None:
        self.vllm_label = self.scheduler.vime_columns.version = label

    def _pause(self, state: PauseState) -> None:
        self.pause_state = state


def scheduled(core: Core) -> Any:
    schedule = core_columns._labelled(lambda _scheduler: SimpleNamespace())
    return schedule(core.scheduler)


def label_of_results(core: Core, step: Any) -> str:
    core.scheduler.vime_columns.begin_step(core.scheduler, step, SimpleNamespace(logprobs=None))
    outputs = {0: SimpleNamespace(weight_version=None)}
    core_columns._attach_step_version(SimpleNamespace(scheduler=core.scheduler), outputs)
    assert outputs[0].weight_version == core.scheduler.vime_columns.step_version
    return str(core.scheduler.vime_columns.step_version)


def test_a_step_in_flight_keeps_the_label_of_the_weights_that_compute_it() -> None:
    core = Core()
    core_swap._swap(core, "7")
    in_flight = scheduled(core)
    core_swap._swap(core, "8")
    after = scheduled(core)
    assert label_of_results(core, in_flight) == "7"
    assert label_of_results(core, after) == "8"


def sampled(core: Core, step: Any, token: int, *, is_last: bool = False) -> Any:
    """Work through the results of a step that samples one token for the request "r"; its output."""
    columns = core.scheduler.vime_columns
    rows = (np.array([[token]], np.int32), np.array([[-1.0]], np.float32), None, None)
    results = SimpleNamespace(logprobs=rows, req_ids=["r"], req_id_to_index={"r": 0})
    output = SimpleNamespace(request_id="r", new_token_ids=[token], routed_experts=None, new_logprobs=None)
    output.finish_reason = "length" if is_last else None
    columns.begin_step(core.scheduler, step, results)
    columns.end_step(core.scheduler, {0: SimpleNamespace(outputs=[output])})
    return output


def test_tokens_of_a_request_are_labelled_by_the_steps_that_made_them() -> None:
    core, wanted = Core(), ColumnRequest()
    core.scheduler.vime_columns._requests["r"] = wanted
    core_swap._swap(core, "7")
    outputs = [sampled(core, scheduled(core), 10)]
    in_flight = scheduled(core)
    core_swap._swap(core, "8")
    outputs += [sampled(core, in_flight, 11), sampled(core, scheduled(core), 12)]
    outputs.append(sampled(core, scheduled(core), 13, is_last=True))
    received = ReceivedColumns(wanted)
    for output in outputs:
        hand_out([output])
        received.add(output.new_logprobs)
    tokens, _, labels = received.piece(0, 4)
    assert (tokens, labels) == ([10, 11, 12, 13], ["7", "7", "8", "8"])


def test_a_swap_is_one_call_of_the_workers_and_leaves_the_engine_running() -> None:
    core = Core()
    core_swap._swap(core, "7")
    assert core.said == [("vime_swap_weights", (7,))]
    assert core.pause_state == PauseState.UNPAUSED
    assert core.scheduler.vime_columns.version == "7"


def test_a_swap_that_fails_runs_no_further_step_and_leaves_the_label() -> None:
    core = Core(fails=True)
    with pytest.raises(PublicationError, match="have not come"):
        core_swap._swap(core, "7")
    assert core.pause_state == PauseState.PAUSED_ALL
    assert core.scheduler.vime_columns.version != "7"


def test_the_pause_is_the_cores_time_and_that_of_the_slowest_gpus_copies() -> None:
    core = Core()
    core_swap._swap(core, "7")
    found = core_swap._seconds(core)
    assert found is not None
    assert 0.5 < found < 0.75
    core.copy_s = [0.25, None]
    assert core_swap._seconds(core) is None


def test_vllms_core_has_the_methods_that_the_route_calls() -> None:
    from vllm.v1.engine.core import EngineCore

    core_swap.install()
    assert {SWAP_WEIGHTS, SWAP_SECONDS} <= vars(EngineCore).keys()


@pytest.mark.parametrize(
    "update", [LoadStream(7), LoadShared(7, handles={}, meta_bytes=0, num_bytes=0, first=True, last=True)]
)
def test_a_version_that_comes_in_parts_needs_the_memory_of_what_was_staged(update: Any) -> None:
    said: list[str] = []
    engine: Any = object.__new__(VimeWeightEngine)
    receiver = SimpleNamespace(stream=lambda: said.append("loaded"))
    engine.inbox = SimpleNamespace(clear=lambda: said.append("let go"), receiver=lambda: receiver)
    engine.device = SimpleNamespace(type="cpu")
    engine._load, engine._load_shared = lambda _: None, lambda _: said.append("loaded")
    engine.receive_weights(VimeUpdate(msgspec.to_builtins(update)))
    assert said == ["let go", "loaded"]
