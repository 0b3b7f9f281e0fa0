"""Typed asynchronous client of one engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Self

import msgspec

from vime.backends.vllm_utils import wire_032 as wire
from vime.backends.vllm_utils import wire_columns
from vime.backends.vllm_utils.abilities import EngineAbilities
from vime.backends.vllm_utils.engine_http import EngineHttp, Poster
from vime.backends.vllm_utils.media_request import generate_with_media
from vime.backends.vllm_utils.protocol import (
    EngineCapabilities,
    EngineMemory,
    EngineMetrics,
    GeneratedPiece,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    Sampling,
    SleepMode,
)
from vime.backends.vllm_utils.sample_stream import sample_stream
from vime.backends.vllm_utils.scoring import score, score_each
from vime.backends.vllm_utils.updates import StageRequest, StageStatus, Update
from vime.errors import EngineError, EngineUnavailable

_SWAP_POLL_S = 0.02


class EngineClient:
    """Calls one engine directly, never through a router. Create it inside a running event loop; close it.

    Every call is bounded in time and raises `EngineError` with address, route, status and an excerpt of the answer.
    """

    def __init__(
        self,
        address: str,
        *,
        control_timeout_s: float = 60.0,
        generate_timeout_s: float = 3600.0,
        update_timeout_s: float = 600.0,
        max_connections: int = 0,
        poster: Poster | None = None,
    ) -> None:
        """`address` is a base URL; `max_connections` 0 means without limit. `poster` sends requests for samples."""
        self._http = EngineHttp(
            address, control_timeout_s=control_timeout_s, max_connections=max_connections, poster=poster
        )
        self.address = self._http.address
        self._generate_timeout_s = generate_timeout_s
        self._update_timeout_s = update_timeout_s
        self._abilities = EngineAbilities(self._http)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; running calls fail."""
        await self._http.close()

    def move(self, address: str) -> None:
        """The engine is at another base URL from now on; calls that run have gone to the one before."""
        self._http.address = self.address = address.rstrip("/")

    async def ready(self) -> bool:
        """True when the engine answers that it is healthy; False when it doesn't answer or says otherwise."""
        try:
            await self._http.call("GET", "/health", timeout_s=10.0)
        except EngineError:
            return False
        return True

    async def check(self, timeout_s: float) -> None:
        """Return when the engine says that it is healthy and has sampled one token.

        Raises `EngineError` when it doesn't within `timeout_s`; an engine that is paused doesn't sample.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._http.call("GET", "/health", timeout_s=timeout_s)
                await self.generate(GenerateRequest(uuid.uuid4().hex, [0], Sampling(max_tokens=1)))
        except TimeoutError as error:
            raise EngineUnavailable(
                f"Engine {self.address} did not pass its check within {timeout_s:g} s.",
                next_step="See the engine's log; it may be overloaded or stuck.",
            ) from error

    async def capabilities(self) -> EngineCapabilities:
        """Ask the engine what it can do."""
        return await self._abilities.all()

    async def world_size(self) -> int:
        """Workers of the engine; 1 where it doesn't say."""
        return await self._abilities.world_size()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample from the engine. A request sent while the engine is paused waits.

        An aborted request returns with `finish_reason` abort and the tokens sampled so far. Cancelling the call
        aborts the request in the engine. Raises `EngineError` for columns from an engine without vime's plug-in, and
        `SampleError` for an answer that lacks the routes of its tokens.
        """
        if request.media:
            return await generate_with_media(self._http, request, timeout_s=self._generate_timeout_s)
        if await self._abilities.of_samples() is not None:
            body = await self._http.call(
                "POST",
                wire_columns.SAMPLE,
                data=wire_columns.encode_call(request),
                timeout_s=self._generate_timeout_s,
                samples=True,
            )
            return wire_columns.decode_answer(body, request)
        if not request.columns.is_empty:
            raise EngineError(
                f"Engine {self.address} has no route {wire_columns.SAMPLE}, which returns {request.columns}.",
                next_step="Start the engine with vime, or with vime's plug-in in VLLM_PLUGINS.",
            )
        body = await self._http.call(
            "POST", wire.GENERATE, data=wire.encode_generate(request), timeout_s=self._generate_timeout_s, samples=True
        )
        return wire.decode_generate(body, request)

    def stream(self, request: GenerateRequest) -> AsyncGenerator[GeneratedPiece]:
        """As `generate`, in pieces while the engine samples; the request may ask for no columns.

        Closing it early ends the request in the engine. Needs vime's plug-in. Raises `EngineUnavailable` when the
        answer breaks off.
        """
        return sample_stream(self._http, request, {}, self._generate_timeout_s)

    async def score(self, token_ids: list[int], start: int) -> list[float]:
        """Natural-log probability of each of `token_ids[start:]` after those before it; `start` is at least 1.

        The engine scores at temperature 1 over the whole vocabulary, whatever it samples with.
        """
        return await score(self._http, token_ids, start, self._generate_timeout_s)

    async def score_each(self, token_ids: list[int], start: int, *, temperature: float) -> list[float]:
        """As `score`, at a temperature and by one request for each token; `start` is at least 1.

        The engine must run with processed log-probabilities, as vime's own do; another one ignores the temperature.
        """
        return await score_each(self._http, token_ids, start, temperature, self._generate_timeout_s)

    async def abort(self, request_id: str) -> None:
        """Abort one request by the id it was sent with; nothing happens if it isn't running."""
        await self._http.json("POST", "/abort_requests", json={"request_ids": [wire.engine_request_id(request_id)]})

    async def abort_all(self) -> None:
        """Abort every request of the engine."""
        await self._http.json("POST", "/abort_requests", json={})

    async def pause(self, mode: PauseMode, *, timeout_s: float | None = None) -> None:
        """Stop sampling: `keep` freezes running requests, `abort` ends them, `wait` lets them finish first."""
        await self._http.json("POST", "/pause", params={"mode": mode, "clear_cache": "false"}, timeout_s=timeout_s)

    async def resume(self) -> None:
        """Go on after `pause`; harmless when the engine isn't paused."""
        await self._http.json("POST", "/resume")

    async def sleep(self, mode: SleepMode = "abort") -> None:
        """Leave the device's memory: weights go to the host, keys and values are forgotten.

        Pause it in the same mode first. `abort` ends every request; with `wait` those that have not begun are worked on
        after `resume`. On a CPU keys and values are forgotten, and nothing is freed.
        """
        params = {"level": "1", "mode": mode}
        await self._http.call("POST", "/sleep", params=params, timeout_s=self._update_timeout_s)

    async def finish_requests(self) -> None:
        """Pause once what runs has been answered, however long that takes; what comes meanwhile is held."""
        await self.pause("wait", timeout_s=self._generate_timeout_s)

    async def wake_up(self, memory: Sequence[EngineMemory]) -> None:
        """Take these parts of the memory back, all where none is named; weights are as before `sleep`.

        Some versions go on sampling as soon as they have all of it, others after `resume`.
        """
        tags = [("tags", part) for part in memory]
        await self._http.call("POST", "/wake_up", params=tags, timeout_s=self._update_timeout_s)

    async def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return bool((await self._http.json("GET", "/is_paused"))["is_paused"])

    async def reset_prefix_cache(self, *, reset_running: bool = False, timeout_s: float = 60.0) -> None:
        """Forget cached keys and values; tried until `timeout_s`, since blocks in use can't be dropped.

        `reset_running` also preempts running requests, which then recompute theirs.
        """
        deadline = time.monotonic() + timeout_s
        params = {"reset_running_requests": str(reset_running).lower(), "reset_external": "true"}
        while not (await self._http.json("POST", "/reset_prefix_cache", params=params)).get("success"):
            if time.monotonic() >= deadline:
                raise EngineError(
                    f"Engine {self.address} could not drop its prefix cache within {timeout_s:g} s.",
                    next_step="Pause it with mode abort first, or reset running requests too.",
                )
            await asyncio.sleep(1.0)

    async def init_weight_transfer(self, init_info: Mapping[str, object]) -> None:
        """Begin to join a sender (`WeightSender.init_info`), who knows when it is done. Not needed for disk."""
        await self._http.json("POST", "/init_weight_transfer_engine", json={"init_info": dict(init_info)})

    async def stage_weights(self, request: StageRequest) -> None:
        """Begin to gather and verify a version beside the model; the engine samples on."""
        encoded = msgspec.json.encode(request).decode()
        body = {"method": "vime_stage_weights", "kwargs": {"request": encoded}}
        await self._http.json("POST", "/collective_rpc", json=body)

    async def staging(self) -> list[StageStatus]:
        """How the staging stands, one status for each worker."""
        answer = await self._http.json("POST", "/collective_rpc", json={"method": "vime_staging"})
        return msgspec.convert(answer["results"], list[StageStatus])

    async def start_weight_update(self) -> None:
        """Open an update, or take over one that a publisher which is gone has left open."""
        try:
            await self._http.json("POST", "/start_weight_update", json={})
        except EngineError as error:
            if wire.UPDATE_IS_OPEN not in error.message:
                raise

    async def update_weights(self, update: Update) -> None:
        """Change the model; blocks until that is done. The engine must be paused.

        Raises `EngineError` with the engine's reason; the update is then closed and the version unchanged.
        """
        body = {"update_info": msgspec.to_builtins(update)}
        await self._http.json("POST", "/update_weights", json=body, timeout_s=self._update_timeout_s)

    async def finish_weight_update(self, version: int) -> None:
        """Close a verified update; from now on the engine labels tokens with `version`."""
        await self._http.json("POST", "/finish_weight_update", json={"weight_version": str(version)})
        if await self._abilities.keep_version():
            await self._http.json("POST", wire_columns.VERSION, json={"version": str(version)})

    async def swaps(self) -> bool:
        """Whether `swap_weights` works."""
        return await self._abilities.swap()

    async def swap_weights(self, version: int) -> None:
        """Load a staged version between two steps: running requests go on, and every token has its weights' label.

        When it fails the engine samples no more, or it was not reached.
        """
        label = {"version": str(version)}
        await self._http.json("POST", wire_columns.SWAP, json=label, timeout_s=self._update_timeout_s)

    async def swap_time_s(self) -> float:
        """How long the newest swap kept the engine from its steps, at most; waits until that is known."""
        while True:
            found = (await self._http.json("GET", wire_columns.SWAP))["seconds"]
            if found is not None:
                return float(found)
            await asyncio.sleep(_SWAP_POLL_S)

    async def weight_version(self) -> int:
        """Version of the engine's weights; `protocol.START_VERSION` before the first publication."""
        if await self._abilities.keep_version():
            return wire.parse_version(str((await self._http.json("GET", wire_columns.VERSION))["version"]))
        return wire.parse_version(str((await self._http.json("GET", "/weight_info"))["weight_version"]))

    async def metrics(self) -> EngineMetrics:
        """Queue lengths now."""
        return wire.parse_metrics((await self._http.call("GET", "/metrics")).decode())
