"""Columns in vLLM's engine core: the rows of a step are sent whole, instead of cut for each request by the scheduler.

vLLM's classes are extended by replacing a few methods, which have the same names in 0.26 and 0.32. A request that
doesn't ask for columns takes vLLM's own way through all of them. At the start of an engine the plug-in compares itself
with that way (`self_test`), so that a vLLM whose methods mean something else is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import LogprobsLists

from vime.backends.vllm_utils.plugin.block_routes import BlockRoutes
from vime.backends.vllm_utils.plugin.columns import ColumnRequest, Nuclei, column_request
from vime.backends.vllm_utils.plugin.step_columns import NucleusRows, RouteRows, RowPlaces, StepColumns, pack_rows
from vime.backends.vllm_utils.plugin.step_extras import take_extras
from vime.backends.vllm_utils.wire_032 import UNLABELLED

HAS_LABELS = "set_weight_version" in vars(EngineCore)
"""Whether this vLLM labels weights itself (0.32 does); otherwise the label is set and asked for through the plug-in."""

_UNUSED = np.zeros(1, np.int32)
_ATTRIBUTE = "vime_columns"
_LABEL = "vime_weight_label"
"""Attribute of vLLM's `SchedulerOutput`."""


@dataclass(frozen=True)
class _Step:
    """Results of one step of a batch."""

    batch: Sequence[str]
    """Requests."""
    places: Mapping[str, int]
    """Of requests in the batch."""
    rows: npt.NDArray[np.int32]
    """As `pack_rows` returns them."""
    first_rows: Sequence[int] | None
    """Of each place, where a request can have several rows."""
    nuclei: NucleusRows | None
    """Of all rows."""

    @classmethod
    def of(cls, output: Any, nuclei: Nuclei | None) -> _Step:
        """From vLLM's `ModelRunnerOutput`, which has log-probabilities."""
        ids, log_probs, _, first_rows = output.logprobs
        rows = pack_rows(ids, log_probs)
        found = None if nuclei is None else NucleusRows.of(nuclei)
        return cls(output.req_ids, output.req_id_to_index, rows, first_rows, found)


_NO_STEP = _Step((), {}, np.zeros((0, 2), np.int32), None, None)


class CoreColumns:
    """What the core of one engine knows of its running requests' columns."""

    def __init__(self) -> None:
        self.version = UNLABELLED
        """Label of the weights that the next step computes with."""
        self.step_version = UNLABELLED
        """Label of those of the step whose results were taken last."""
        self._requests: dict[str, ColumnRequest] = {}
        self._places = RowPlaces()
        self._asking: list[str] | None = None
        """The batch whose requests were last found to ask for columns, all of them."""
        self._step = _NO_STEP
        """What the scheduler works through."""
        self._routes: BlockRoutes | None = None

    def add(self, request: Any) -> None:
        """Know of a new request, when it asks for columns."""
        wanted = column_request(request.sampling_params)
        if wanted is not None:
            self._requests[request.request_id] = wanted
            self._forget_batch()

    def begin_step(self, scheduler: Any, step: Any, output: Any) -> None:
        """Take the results of a step that the scheduler is about to work through."""
        self.step_version = label_of(step, self.version)
        extras = take_extras(output)
        if extras.routes is not None:
            self._add_routes(scheduler, step, output.req_ids, extras.routes)
        if self._requests and output.logprobs is not None:
            self._step = _Step.of(output, extras.nuclei if self._wants_nuclei() else None)
            # Without log-probabilities the scheduler cuts none for each request.
            stock = None if self._all_ask(output.req_ids) else output.logprobs
            output.logprobs = None if stock is None else _StockLogProbs(stock, output.req_ids, self._requests)

    def end_step(self, scheduler: Any, outputs: Mapping[int, Any]) -> None:
        """Attach the rows to what the scheduler is about to send."""
        if self._requests:
            for batch in outputs.values():
                self._attach(batch.outputs)
        self._step = _NO_STEP
        if self._routes is not None:
            self._routes.keep_only(scheduler.requests)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have no further output."""
        for request_id in request_ids:
            if self._requests.pop(request_id, None) is not None:
                self._forget_batch()

    def _forget_batch(self) -> None:
        self._asking = None
        self._places.forget()

    def _all_ask(self, batch: list[str]) -> bool:
        """Whether all requests of a batch ask for columns; most steps have the batch of the step before."""
        if batch != self._asking:
            self._asking = list(batch) if all(request_id in self._requests for request_id in batch) else None
        return self._asking is not None

    def _attach(self, outputs: Sequence[Any]) -> None:
        """Every step passes here, so nothing is made for each of its outputs."""
        request_ids = [output.request_id for output in outputs]
        special = [
            output for output in outputs if output.finish_reason is not None or output.routed_experts is not None
        ]
        step = self._step
        places = self._places.find(request_ids, step.batch, step.places, step.first_rows, self._requests)
        routes = self._take_routes(outputs) if special or self._routes is not None else None
        if places.first is not None and (len(step.rows) or routes is not None):
            found = StepColumns(self.step_version, places.first_rows, step.nuclei, routes)
            outputs[places.first].new_logprobs = LogprobsLists(step.rows, found.encode(), _UNUSED, None)
        self.drop(output.request_id for output in special if output.finish_reason is not None)

    def _wants_nuclei(self) -> bool:
        return any(request.nucleus for request in self._requests.values())

    def _take_routes(self, outputs: Iterable[Any]) -> RouteRows | None:
        """Of all outputs whose requests ask for them."""
        rows: list[npt.NDArray[Any] | None] = []
        for output in outputs:
            wanted, found = self._requests.get(output.request_id), None
            if wanted is not None:
                found, output.routed_experts = output.routed_experts, None
                if wanted.routes_from is None:
                    found = None
                elif self._routes is not None:
                    found = self._routes.take(output.request_id, wanted.routes_from)
            rows.append(found)
        return RouteRows.of(rows)

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

    def __init__(self, stock: Any, request_ids: list[str], with_columns: Container[str]) -> None:
        self._stock, self._request_ids, self._with_columns = stock, request_ids, with_columns

    def slice_request(self, index: int, num_positions: int) -> Any:
        if self._request_ids[index] in self._with_columns:
            return None
        return self._stock.slice_request(index, num_positions)


def install() -> None:
    """Extend vLLM's classes in this process; may be called more than once."""
    if _ATTRIBUTE in vars(Scheduler):
        return
    Scheduler.vime_columns = functools.cached_property(lambda _scheduler: CoreColumns())
    Scheduler.vime_columns.__set_name__(Scheduler, _ATTRIBUTE)
    Scheduler.add_request = _adding(Scheduler.add_request)
    Scheduler.schedule = _labelled(Scheduler.schedule)
    Scheduler.update_from_output = _collecting(Scheduler.update_from_output)
    Scheduler.finish_requests = _dropping(Scheduler.finish_requests)
    EngineCore.vime_weight_version = _weight_version
    if HAS_LABELS:
        EngineCore.set_weight_version = _labelling(EngineCore.set_weight_version)
        EngineCore._attach_weight_version = _attach_step_version
    else:
        EngineCore.vime_set_weight_version = _set_version


def _adding(add_request: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(add_request)
    def extended(scheduler: Any, request: Any) -> None:
        add_request(scheduler, request)
        scheduler.vime_columns.add(request)

    return extended


def label_of(step: Any, otherwise: str) -> str:
    """Label of the weights that a step computes with, which may have been swapped since it was scheduled."""
    label: str = vars(step).get(_LABEL, otherwise)
    return label


def _labelled(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Workers take steps and swaps in the order in which the core sends them."""

    @functools.wraps(schedule)
    def extended(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        step = schedule(scheduler, *args, **kwargs)
        setattr(step, _LABEL, scheduler.vime_columns.version)
        return step

    return extended


def _attach_step_version(core: Any, outputs: Mapping[int, Any]) -> None:
    """vLLM's own attaches the newest label, which a step in flight may be older than."""
    for output in outputs.values():
        output.weight_version = core.scheduler.vime_columns.step_version


def _collecting(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def extended(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        scheduler.vime_columns.begin_step(scheduler, scheduler_output, model_runner_output)
        outputs = update(scheduler, scheduler_output, model_runner_output)
        scheduler.vime_columns.end_step(scheduler, outputs)
        return outputs

    return extended


def _dropping(finish_requests: Callable[..., Any]) -> Callable[..., Any]:
    """Ends requests from outside the scheduler: a client that leaves, a pause that aborts, an error."""

    @functools.wraps(finish_requests)
    def extended(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        ended = finish_requests(scheduler, *args, **kwargs)
        scheduler.vime_columns.drop(request.request_id for request in ended)
        return ended

    return extended


def _labelling(set_weight_version: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(set_weight_version)
    def extended(core: Any, weight_version: str) -> None:
        set_weight_version(core, weight_version)
        _set_version(core, weight_version)

    return extended


def set_label(core: Any, weight_version: str) -> None:
    """Label the weights of all steps that are scheduled from now on."""
    if HAS_LABELS:
        core.set_weight_version(weight_version)
    else:
        _set_version(core, weight_version)


def _set_version(core: Any, weight_version: str) -> None:
    core.scheduler.vime_columns.version = weight_version


def _weight_version(core: Any) -> str:
    return str(core.scheduler.vime_columns.version)


def _blocks(scheduler: Any, request_id: str) -> list[int]:
    (blocks,) = scheduler.kv_cache_manager.get_block_ids(request_id)
    return list(blocks)
