"""Columns in vLLM's engine core: its scheduler's per-request results are collected here instead of sent each step.

vLLM's classes are extended by replacing a few methods, which have the same names in 0.26 and 0.32. A request that
doesn't ask for columns takes vLLM's own way through all of them. At the start of an engine the plug-in compares itself
with that way (`self_test`), so that a vLLM whose methods mean something else is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.outputs import LogprobsLists

from vime.backends.vllm_utils.plugin.block_routes import BlockRoutes
from vime.backends.vllm_utils.plugin.columns import Pending, StepRows, column_request
from vime.backends.vllm_utils.plugin.step_extras import take_extras
from vime.backends.vllm_utils.wire_032 import UNLABELLED

HAS_LABELS = "set_weight_version" in vars(EngineCore)
"""Whether this vLLM labels weights itself (0.32 does); otherwise the label is set and asked for through the plug-in."""

_UNUSED = np.zeros(1, np.int32)
_ATTRIBUTE = "vime_columns"


class CoreColumns:
    """What the core of one engine holds of its running requests' columns."""

    def __init__(self) -> None:
        self.version = UNLABELLED
        """Label of the weights that the next step computes with."""
        self._pending: dict[str, Pending] = {}
        self._step: tuple[StepRows, Mapping[str, int]] | None = None
        """Rows of the step that the scheduler works through, and the place of each request in its batch."""
        self._num_requests = 0
        self._routes: BlockRoutes | None = None

    def add(self, request: Any) -> None:
        """Begin to collect for a new request, when it asks for columns."""
        wanted = column_request(request.sampling_params)
        if wanted is not None:
            self._pending[request.request_id] = Pending.start(wanted, self._num_requests)
            self._num_requests += 1

    def begin_step(self, scheduler: Any, step: Any, output: Any) -> None:
        """Take the results of a step that the scheduler is about to work through."""
        extras = take_extras(output)
        if extras.routes is not None:
            self._add_routes(scheduler, step, output.req_ids, extras.routes)
        if self._pending and output.logprobs is not None:
            ids, log_probs, _, first_rows = output.logprobs
            self._step = StepRows(ids, log_probs, first_rows, extras.nuclei), output.req_id_to_index
            others = any(request_id not in self._pending for request_id in output.req_ids)
            # Without log-probabilities the scheduler cuts none for each request.
            output.logprobs = _StockLogProbs(output.logprobs, output.req_ids, self._pending) if others else None

    def end_step(self, scheduler: Any, outputs: Mapping[int, Any]) -> None:
        """Take the rows of what the scheduler is about to send, and attach blocks that are due."""
        step, self._step = self._step, None
        if self._pending:
            for batch in outputs.values():
                for output in batch.outputs:
                    pending = self._pending.get(output.request_id)
                    if pending is not None:
                        self._end_output(output, pending, step)
        if self._routes is not None:
            self._routes.keep_only(scheduler.requests)

    def relabel(self, version: str) -> None:
        """The weights have changed; rows that are held were made by those before."""
        for pending in self._pending.values():
            pending.label(self.version)
        self.version = version

    def finish(self, output: Any) -> None:
        """Attach everything that is held of a request whose last output this is."""
        pending = self._pending.pop(output.request_id, None)
        if pending is not None:
            self._attach(output, pending)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests whose answers have gone out."""
        for request_id in request_ids:
            self._pending.pop(request_id, None)

    def _end_output(self, output: Any, pending: Pending, step: tuple[StepRows, Mapping[str, int]] | None) -> None:
        num_tokens = len(output.new_token_ids)
        if num_tokens and step is not None:
            step[0].add_to(pending, step[1][output.request_id], num_tokens)
        if output.routed_experts is not None:
            if pending.request.routes_from is not None:
                pending.routes.append(output.routed_experts)
            output.routed_experts = None
        if output.finish_reason is not None:
            self.finish(output)
        elif pending.is_due:
            self._attach(output, pending)

    def _attach(self, output: Any, pending: Pending) -> None:
        if self._routes is not None and pending.request.routes_from is not None:
            rows = self._routes.take(output.request_id, pending.request.routes_from)
            pending.routes += [] if rows is None else [rows]
        block = pending.take(self.version)
        if block is not None:
            output.new_logprobs = LogprobsLists(np.frombuffer(block, np.uint8), _UNUSED, _UNUSED, None)

    def _add_routes(self, scheduler: Any, step: Any, request_ids: Iterable[str], routes: Any) -> None:
        """`routes` [tokens of the step, L, K], request after request in the order of the batch."""
        if self._routes is None:
            self._routes = BlockRoutes(scheduler.block_size)
        cached = step.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        position = 0
        for request_id in request_ids:
            count = step.num_scheduled_tokens[request_id]
            if request_id in scheduler.requests:
                blocks = functools.partial(_blocks, scheduler, request_id)
                self._routes.add(request_id, starts[request_id], routes[position : position + count], blocks)
            position += count


class _StockLogProbs:
    """Stands in for a step's `LogprobsLists` where some requests ask for no columns: those get what vLLM gives."""

    def __init__(self, stock: Any, request_ids: list[str], pending: Mapping[str, Pending]) -> None:
        self._stock, self._request_ids, self._pending = stock, request_ids, pending

    def slice_request(self, index: int, num_positions: int) -> Any:
        if self._request_ids[index] in self._pending:
            return None
        return self._stock.slice_request(index, num_positions)


def install() -> None:
    """Extend vLLM's classes in this process; may be called more than once."""
    if _ATTRIBUTE in vars(Scheduler):
        return
    Scheduler.vime_columns = functools.cached_property(lambda _scheduler: CoreColumns())
    Scheduler.vime_columns.__set_name__(Scheduler, _ATTRIBUTE)
    Scheduler.add_request = _adding(Scheduler.add_request)
    Scheduler.update_from_output = _collecting(Scheduler.update_from_output)
    EngineCore.abort_requests = _dropping(EngineCore.abort_requests)
    EngineCoreProc._send_finish_outputs_to_client = _send_finish_outputs
    EngineCore.vime_weight_version = _weight_version
    if HAS_LABELS:
        EngineCore.set_weight_version = _labelling(EngineCore.set_weight_version)
    else:
        EngineCore.vime_set_weight_version = _set_version


def _adding(add_request: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(add_request)
    def extended(scheduler: Any, request: Any) -> None:
        add_request(scheduler, request)
        scheduler.vime_columns.add(request)

    return extended


def _collecting(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def extended(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        scheduler.vime_columns.begin_step(scheduler, scheduler_output, model_runner_output)
        outputs = update(scheduler, scheduler_output, model_runner_output)
        scheduler.vime_columns.end_step(scheduler, outputs)
        return outputs

    return extended


def _dropping(abort_requests: Callable[..., None]) -> Callable[..., None]:
    """The API server asks for this after it has answered."""

    @functools.wraps(abort_requests)
    def extended(core: Any, request_ids: list[str]) -> None:
        abort_requests(core, request_ids)
        core.scheduler.vime_columns.drop(request_ids)

    return extended


def _labelling(set_weight_version: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(set_weight_version)
    def extended(core: Any, weight_version: str) -> None:
        set_weight_version(core, weight_version)
        _set_version(core, weight_version)

    return extended


def _set_version(core: Any, weight_version: str) -> None:
    core.scheduler.vime_columns.relabel(weight_version)


def _weight_version(core: Any) -> str:
    return str(core.scheduler.vime_columns.version)


def _send_finish_outputs(core: Any, req_ids: list[str], client_index: int, finish_reason: Any) -> None:
    """Ends requests from the core's side: a pause that aborts, a shutdown, an error. Their last rows go along."""
    outputs = [EngineCoreOutput(request_id, [], finish_reason=finish_reason) for request_id in req_ids]
    for output in outputs:
        core.scheduler.vime_columns.finish(output)
    core.output_queue.put_nowait((client_index, EngineCoreOutputs(finished_requests=set(req_ids), outputs=outputs)))


def _blocks(scheduler: Any, request_id: str) -> list[int]:
    (blocks,) = scheduler.kv_cache_manager.get_block_ids(request_id)
    return list(blocks)
