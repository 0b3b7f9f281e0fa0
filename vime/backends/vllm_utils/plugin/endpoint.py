"""The sample route as vLLM's endpoint plug-in: attached when the API server is built, tested before it listens."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from vllm import __version__ as vllm_version

from vime.backends.vllm_utils.plugin import PLUGIN
from vime.backends.vllm_utils.plugin.core_columns import HAS_LABELS
from vime.backends.vllm_utils.plugin.sample_route import SampleRoute
from vime.backends.vllm_utils.plugin.self_test import NUM_TOKENS, check_route
from vime.backends.vllm_utils.plugin.stock_answers import stock_answer
from vime.backends.vllm_utils.plugin.stream_route import StreamRoute
from vime.backends.vllm_utils.plugin.worker_methods import START_CAPTURE
from vime.backends.vllm_utils.wire_columns import CAPTURE_ENV, SAMPLE, SWAP, VERSION, SampleAbilities
from vime.backends.vllm_utils.wire_stream import STREAM


class SampleEndpoint:
    """Entry point of the `vllm.endpoint_plugins` group."""

    name = PLUGIN
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._route: SampleRoute | None = None
        self._stream: StreamRoute | None = None

    def attach_router(self, app: Any) -> None:
        """Called before there is an engine."""
        routes = [
            Route(SAMPLE, self._serve, methods=["POST"]),
            Route(STREAM, self._serve_stream, methods=["POST"]),
            Route(SAMPLE, self._tell, methods=["GET"]),
            Route(VERSION, self._tell_label, methods=["GET"]),
            Route(VERSION, self._set_label, methods=["POST"]),
            Route(SWAP, self._tell_swap, methods=["GET"]),
            Route(SWAP, self._swap, methods=["POST"]),
        ]
        # A request is compared with one route after another, and vLLM has some sixty.
        app.router.routes[:0] = routes

    async def init_state(self, engine_client: Any, _state: Any, args: Any) -> None:
        """Switch on what the launcher asked for, and compare the route with vLLM's own answers.

        Raises `EngineStartError` when they differ: the engine then doesn't start.
        """
        captured = os.environ.get(CAPTURE_ENV, "").split()
        if captured:
            await engine_client.collective_rpc(START_CAPTURE, args=("routes" in captured, "nucleus" in captured))
        config = engine_client.vllm_config
        model = config.model_config
        vocab_size = int(model.get_vocab_size())
        abilities = SampleAbilities(
            max_candidates=vocab_size if model.max_logprobs == -1 else min(int(model.max_logprobs), vocab_size),
            routes=bool(args.enable_return_routed_experts) or "routes" in captured,
            nucleus="nucleus" in captured,
            keeps_version=not HAS_LABELS,
            # Cores that compute experts together would change them at different steps.
            swaps=config.weight_transfer_config is not None and config.parallel_config.data_parallel_size == 1,
        )
        # What vime captures has no dense layers.
        dense = 0 if "routes" in captured else int(vars(model.hf_text_config).get("first_k_dense_replace") or 0)
        route, stock = SampleRoute(engine_client, abilities, dense), partial(stock_answer, engine_client, dense)
        is_drafting = config.speculative_config is not None
        await check_route(stock, route.sample, abilities, _prompt(config), vllm_version, is_drafting=is_drafting)
        self._route, self._stream = route, StreamRoute(engine_client)

    async def _tell(self, request: Request) -> Response:
        return await self._started().tell(request)

    async def _serve(self, request: Request) -> Response:
        return await self._started().serve(request)

    async def _serve_stream(self, request: Request) -> Response:
        if self._stream is None:
            raise RuntimeError("The stream route was called before the engine was ready.")
        return await self._stream.serve(request)

    async def _tell_label(self, _request: Request) -> Response:
        return await self._started().tell_label()

    async def _set_label(self, request: Request) -> Response:
        return await self._started().set_label(await request.body())

    async def _swap(self, request: Request) -> Response:
        return await self._started().swap(await request.body())

    async def _tell_swap(self, _request: Request) -> Response:
        return await self._started().tell_swap()

    def _started(self) -> SampleRoute:
        if self._route is None:
            raise RuntimeError("The sample route was called before the engine was ready.")
        return self._route


def _prompt(config: Any) -> list[int]:
    """Token ids for the comparison: more than a block of the prefix cache holds, where the model takes as many."""
    size = min(int(config.model_config.get_vocab_size()), 1000)
    length = max(2, min(config.cache_config.block_size + 2, config.model_config.max_model_len - NUM_TOKENS - 1))
    return [7 * position % size for position in range(length)]
