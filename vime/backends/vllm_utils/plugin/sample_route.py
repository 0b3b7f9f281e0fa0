"""The sample route in vLLM's API server; see `vime.backends.vllm_utils.wire_columns` for its messages."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from vime.backends.vllm_utils.plugin.columns import OPTION, ColumnRequest, Columns
from vime.backends.vllm_utils.plugin.core_swap import SWAP_SECONDS, SWAP_WEIGHTS
from vime.backends.vllm_utils.plugin.draft_counts import draft_counts
from vime.backends.vllm_utils.plugin.stock_answers import last_output, moe_layers
from vime.backends.vllm_utils.wire_032 import engine_request_id
from vime.backends.vllm_utils.wire_columns import (
    MSGPACK,
    NucleusColumn,
    RouteColumn,
    SampleAbilities,
    SampleAnswer,
    SampleCall,
    Span,
    SwapTime,
    WeightLabel,
    decode_call,
)


class SampleRoute:
    """Serves calls with one engine."""

    def __init__(self, engine: Any, abilities: SampleAbilities, num_dense_layers: int = 0) -> None:
        """`engine` is vLLM's `AsyncLLM`; `num_dense_layers` come before those with experts (see `moe_layers`)."""
        self._engine, self._abilities, self._num_dense_layers = engine, abilities, num_dense_layers

    async def sample(self, call: SampleCall) -> SampleAnswer:
        """Sample as asked. Cancelling it aborts the request.

        Raises `ValueError` for what this engine can't do.
        """
        self._check(call)
        prompt = tokens_input(np.frombuffer(call.token_ids, "<i4").tolist(), cache_salt=call.cache_salt)
        name = engine_request_id(call.request_id)
        wanted = ColumnRequest(
            num_candidates=call.num_candidates,
            routes_from=call.routes_from,
            nucleus=call.nucleus,
        )
        result = await last_output(self._engine.generate(prompt, request_parameters(call, wanted), name))
        return _answer(call, result, self._num_dense_layers)

    async def tell_label(self) -> Response:
        """Answer with the label of the engine's weights."""
        label = await self._engine.engine_core.call_utility_async("vime_weight_version")
        return Response(msgspec.json.encode(WeightLabel(label)), media_type="application/json")

    async def set_label(self, body: bytes) -> Response:
        """Label the weights of an engine that has no labels of its own."""
        try:
            label = msgspec.json.decode(body, type=WeightLabel)
        except msgspec.MsgspecError as error:
            return refusal(error)
        if not self._abilities.keeps_version:
            return refusal(ValueError("This vLLM labels weights itself: finish_weight_update sets the label."))
        await self._engine.engine_core.call_utility_async("vime_set_weight_version", label.version)
        return await self.tell_label()

    async def swap(self, body: bytes) -> Response:
        """Load a staged version between two steps; answers with its label."""
        try:
            label = msgspec.json.decode(body, type=WeightLabel)
        except msgspec.MsgspecError as error:
            return refusal(error)
        if not self._abilities.swaps:
            return refusal(ValueError("This engine can't change its weights between two steps; pause it."))
        try:
            await self._engine.engine_core.call_utility_async(SWAP_WEIGHTS, label.version)
        except Exception as error:  # whatever the engine's core has to say of it
            return refusal(error, status=500)
        return Response(msgspec.json.encode(label), media_type="application/json")

    async def tell_swap(self) -> Response:
        """Answer with the time that the newest swap took from the engine."""
        seconds = await self._engine.engine_core.call_utility_async(SWAP_SECONDS)
        return Response(msgspec.json.encode(SwapTime(seconds)), media_type="application/json")

    def _check(self, call: SampleCall) -> None:
        abilities = self._abilities
        if call.routes_from is not None and not abilities.routes:
            raise ValueError("This engine was not started to return routes.")
        if call.nucleus and not abilities.nucleus:
            raise ValueError("This engine was not started to return nuclei.")
        if call.num_candidates > abilities.max_candidates:
            raise ValueError(f"{call.num_candidates} candidates, allowed: {abilities.max_candidates}.")

    async def tell(self, _request: Request) -> Response:
        """Answer a GET."""
        return Response(msgspec.json.encode(self._abilities), media_type="application/json")

    async def serve(self, request: Request) -> Response:
        """Answer a POST; a client that leaves ends its request in the engine."""
        try:
            call = decode_call(await request.body(), request.headers.get("content-type", ""))
        except ValueError as error:
            return refusal(error)
        sampling = asyncio.create_task(self.sample(call))
        leaving = asyncio.create_task(left(request))
        try:
            await asyncio.wait((sampling, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not sampling.done():
                return Response(status_code=499)
            return Response(msgspec.msgpack.encode(sampling.result()), media_type=MSGPACK)
        except ValueError as error:  # vLLM's word on a request that it doesn't take
            return refusal(error)
        finally:
            leaving.cancel()
            sampling.cancel()


def request_parameters(call: SampleCall, wanted: ColumnRequest) -> SamplingParams:
    """Parameters of a request that wants those columns. Raises `ValueError`."""
    try:
        parameters = SamplingParams(**call.sampling | {"logprobs": call.num_candidates})
    except TypeError as error:
        raise ValueError(f"sampling: {error}") from error
    parameters.output_kind = RequestOutputKind.FINAL_ONLY
    parameters.skip_clone = True  # vLLM copies them deeply otherwise, and nobody else has these
    parameters.extra_args = {OPTION: msgspec.to_builtins(wanted)}
    if call.routes_from:
        parameters.routed_experts_prompt_start = call.routes_from
    return parameters


def _answer(call: SampleCall, result: Any, num_dense_layers: int) -> SampleAnswer:
    """Rows of tokens that a stop text cuts off, in a step that sampled several, are left out."""
    (output,) = result.outputs
    columns: Columns = output.logprobs.columns()
    token_ids = np.asarray(output.token_ids, "<i4")
    num_tokens = len(token_ids)
    if not np.array_equal(token_ids, columns.sampled_ids[:num_tokens]):
        raise RuntimeError(f"Request {call.request_id}: the columns belong to other tokens than those sampled.")
    columns = columns.head(num_tokens)
    return SampleAnswer(
        num_candidates=call.num_candidates,
        token_ids=token_ids.tobytes(),
        log_probs=columns.log_probs.tobytes(),
        candidate_ids=columns.candidate_ids.data,
        candidate_log_probs=columns.candidate_log_probs.data,
        finish_reason=output.finish_reason,
        spans=_spans(columns.versions, num_tokens),
        num_prompt_tokens=len(result.prompt_token_ids),
        num_cached_tokens=result.num_cached_tokens or 0,
        routes=_routes(moe_layers(columns.routes, num_dense_layers), call.routes_from),
        nucleus=_nucleus(columns),
        drafts=draft_counts(output),
    )


def _spans(versions: list[tuple[str, int]], num_tokens: int) -> list[Span]:
    spans, start = [], 0
    for label, count in versions:
        stop = min(start + count, num_tokens)
        if start < stop:
            spans.append(Span(label, start, stop))
        start = stop
    return spans


def _routes(routes: npt.NDArray[Any] | None, start: int | None) -> RouteColumn | None:
    if routes is None or start is None:
        return None
    rows, layers, top_k = routes.shape
    return RouteColumn(routes.dtype.str, (rows, layers, top_k), np.ascontiguousarray(routes).data, start)


def _nucleus(columns: Columns) -> NucleusColumn | None:
    nuclei = columns.nuclei
    if nuclei is None:
        return None
    return NucleusColumn(nuclei.ids.tobytes(), nuclei.offsets.tobytes(), nuclei.log_probs.tobytes())


def refusal(error: Exception, *, status: int = 400) -> Response:
    """The reason, as vLLM's server tells it."""
    body = msgspec.json.encode({"error": {"message": str(error), "code": status}})
    return Response(body, status_code=status, media_type="application/json")


async def left(request: Request) -> None:
    """Returns when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
