"""A stand-in for a vLLM server: the same routes and answers, in process, without a model.

Tokens are a function of the weights' digest and the tokens so far, so greedy decoding repeats itself, and changes when
the weights change. It is held to the contract tests that the real engine passes. Faults are switched on by attribute.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import numpy as np
import torch
from aiohttp import web

from tests.support.tiny_models import VOCAB_SIZE, token_text
from vime.backends.vllm_utils.digest import WeightDigest
from vime.backends.vllm_utils.inbox import WeightInbox
from vime.backends.vllm_utils.receiving import NamedTensors, parse_group_init
from vime.backends.vllm_utils.updates import LoadStaged, LoadStream, RememberHeld, parse_stage_request, parse_update
from vime.backends.vllm_utils.wire_columns import (
    SAMPLE,
    SWAP,
    VERSION,
    DraftCounts,
    NucleusColumn,
    RouteColumn,
    SampleAbilities,
    SampleAnswer,
    Span,
    decode_call,
)
from vime.backends.vllm_utils.wire_stream import STREAM, encode_frame, stream_piece
from vime.errors import PublicationError

Misbehaviour = Literal["hang", "error", "error after", "die"]
"""Never answer; answer 500 without doing anything; do it and answer 500; break every connection from now on."""

UNLIKELIER = 2.0
"""By so much other tokens are less probable than the likeliest, as natural logarithms."""
PIECE_TOKENS = 5
"""Of a stream."""
BLOCK_TOKENS = 128
"""Prefix blocks are cached whole, as in vLLM."""


@dataclass
class Faults:
    """What should go wrong. Counters are used up by one request each."""

    step_s: float = 0.0005
    """Seconds per sampled token."""
    num_tokens_before_abort: int | None = None
    """Requests are aborted after so many tokens."""
    num_dropped_connections: int = 0
    num_null_log_probs: int = 0
    forgets_routes_every: int | None = None
    """Each so many answers with routes come without them."""
    num_failed_updates: int = 0
    """Versions that are staged and then fail to load."""
    num_ignored_stagings: int = 0
    """Requests to stage a version that are answered, but not followed."""
    steps: dict[str, Misbehaviour] = field(default_factory=dict)
    """Route, or worker method of /collective_rpc -> what happens to calls of it."""
    failing_prompts: set[tuple[int, ...]] = field(default_factory=set)
    """Requests for samples of these token ids are answered 500."""
    dead: bool = False
    """No call is answered."""
    keeps_cache: bool = False
    """It answers a reset of its cache with status 200, and says in the answer that it did not."""


@dataclass
class _Request:
    transport: asyncio.Transport | None
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class _Sampled:
    """What one request got."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    nucleus_sizes: list[int] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)
    """[version, start, stop]"""
    num_cached: int = 0
    reason: str = "length"


class StandinEngine:
    """Serves on a free port of 127.0.0.1 from a thread of its own; use it with `with`."""

    def __init__(
        self,
        vocab_size: int = 50,
        max_model_len: int = 2048,
        required_names: frozenset[str] = frozenset(),
        num_workers: int = 1,
    ):
        """`required_names` are the checkpoint names that an update must bring to fill the "model".

        Each of `num_workers` receives weights for itself, as the tensor-parallel workers of an engine do.
        """
        self._num_workers = num_workers
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.required_names = required_names
        self.faults = Faults()
        self.asleep: set[str] = set()
        """Parts of its memory that it has left; a request or an update that needs one fails."""
        self.events: list[str] = []
        """What it was told about its memory, and the versions that it loaded."""
        self.has_columns = True
        """Whether vime's plug-in is there, which serves the sample route."""
        self.has_raw_log_probs = False
        """Whether temperatures change no log-probability, as with vLLM's --logprobs-mode raw_logprobs."""
        self.media_token: int | None = None
        """What stands for a medium in a prompt; the model gets it three times."""
        self.media: list[str] = []
        """URLs of the media that it was sent."""
        self.swap_seconds: list[float | None] = []
        """What it tells of the time of a swap, answer after answer."""
        self.num_drafted = 0
        """Tokens that a step drafts, one of which is accepted; 0: no speculative decoding."""
        self.swaps = False
        """Whether staged versions can be loaded between two steps."""
        self.has_sleep = True
        """Whether it says that it can sleep."""
        self.keeps_version = False
        """Whether the version is set and asked for by the plug-in's route, as with a vLLM that has no labels."""
        self.version = "default"
        self.weights_digest = "start"
        self.address = ""
        self.port = 0
        """0 lets the system choose; read when the engine is entered."""
        self._requests: dict[str, _Request] = {}
        self.cache: set[tuple[str | None, tuple[int, ...]]] = set()
        self._inboxes = self._empty_inboxes()
        self._noted = ""
        self._update_open = self._loaded = False
        self._num_running = self._num_routed = 0
        self.num_served = 0
        """Requests for samples that have begun."""
        self.num_pieces = 0
        """Pieces of streams that have been sent."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._started = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def start_anew(self) -> None:
        """As after a restart of its process: with the weights that it was started with, and no faults."""
        self._leave()
        self._inboxes = self._empty_inboxes()
        self.version, self.weights_digest, self.cache = "default", "start", set()
        self.asleep = set()
        self._update_open = self._loaded = False
        self._loop.call_soon_threadsafe(self._running.set)
        self._loop.call_soon_threadsafe(self._admits.set)
        self.faults = Faults()

    def die(self) -> None:
        """As when its process is killed: no call is answered any more, and running requests lose their connections."""
        self.faults.dead = True
        self._loop.call_soon_threadsafe(self._break_connections)

    def _break_connections(self) -> None:
        for request in self._requests.values():
            if request.transport is not None:
                request.transport.abort()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take these weights as the ones that the engine was started with."""
        self.weights_digest = _digest(tensors)

    def greedy(self, tensors: Iterable[tuple[str, torch.Tensor]], prompt: list[int], num_tokens: int) -> list[int]:
        """The tokens that this stand-in samples under the given weights."""
        digest, tokens = _digest(tensors), list(prompt)
        for _ in range(num_tokens):
            tokens.append(self._next_token(tokens, digest)[0])
        return tokens[len(prompt) :]

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._run())
        self._loop.close()

    async def _run(self) -> None:
        self._closing = asyncio.Event()
        self._running, self._admits = asyncio.Event(), asyncio.Event()
        self._running.set()
        self._admits.set()
        app = web.Application(client_max_size=1 << 28, middlewares=[self._misbehave])
        app.add_routes(
            [
                web.get("/health", self._ok),
                web.get("/version", lambda _: _answer(version="0.32.0+standin")),
                web.get("/v1/models", lambda _: _answer(data=[{"id": "standin", "max_model_len": self.max_model_len}])),
                web.get("/get_world_size", lambda _: _answer(world_size=self._num_workers)),
                web.get("/openapi.json", self._openapi),
                web.get("/metrics", self._metrics),
                web.get("/weight_info", self._tell_version),
                web.get("/is_paused", lambda _: _answer(is_paused=not self._running.is_set())),
                web.post("/inference/v1/generate", self._generate),
                web.get(SAMPLE, self._tell_abilities),
                web.post(SAMPLE, self._generate_columns),
                web.post(STREAM, self._stream),
                web.get(VERSION, lambda _: _answer(version=self.version)),
                web.post(VERSION, self._set_label),
                web.get(SWAP, lambda _: _answer(seconds=self.swap_seconds.pop(0) if self.swap_seconds else 0.0)),
                web.post(SWAP, self._swap),
                web.post("/abort_requests", self._abort),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.post("/sleep", self._sleep),
                web.post("/wake_up", self._wake_up),
                web.post("/init_weight_transfer_engine", self._init_transfer),
                web.post("/collective_rpc", self._collective_rpc),
                web.post("/start_weight_update", self._start_update),
                web.post("/update_weights", self._update),
                web.post("/finish_weight_update", self._finish_update),
            ]
        )
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        await self._closing.wait()
        await runner.cleanup()
        self._leave()

    def _empty_inboxes(self) -> list[WeightInbox]:
        return [WeightInbox(number) for number in range(self._num_workers)]

    def _leave(self) -> None:
        for inbox in self._inboxes:
            inbox.leave()

    @web.middleware
    async def _misbehave(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        step = request.path
        if step == "/collective_rpc":
            step = (await request.json())["method"]
        behaviour = self.faults.steps.get(step)
        if behaviour == "die":
            self.faults.dead = True
        if self.faults.dead and request.transport is not None:
            request.transport.abort()
            raise asyncio.CancelledError
        if behaviour == "error":
            return await _error(500, f"{step} was told to fail.")
        while self.faults.steps.get(step) == "hang":
            await asyncio.sleep(0.01)
        answer = await handler(request)
        return await _error(500, f"{step} was told to fail.") if behaviour == "error after" else answer

    async def _ok(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _tell_version(self, _request: web.Request) -> web.Response:
        if self.keeps_version:
            raise web.HTTPNotFound
        return await _answer(weight_version=self.version)

    async def _set_label(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["version"]
        return await _answer(version=self.version)

    async def _openapi(self, request: web.Request) -> web.Response:
        paths = {resource.canonical: {} for resource in request.app.router.resources()}
        if not self.has_sleep:
            del paths["/sleep"]
        schema = {"GenerateRequest": {"properties": {"token_ids": {}, "cache_salt": {}}}}
        return await _answer(paths=paths, components={"schemas": schema})

    async def _metrics(self, _request: web.Request) -> web.Response:
        running = self._num_running if self._running.is_set() else 0
        waiting = self._num_running - running
        labels = '{engine="0",model_name="standin"}'
        return web.Response(
            text=f"vllm:num_requests_running{labels} {running}.0\nvllm:num_requests_waiting{labels} {waiting}.0\n"
            f"vllm:request_success_total{labels} {self.num_served - self._num_running}.0\n"
        )

    async def _generate(self, http_request: web.Request) -> web.Response:
        body = await http_request.json()
        prompt, salt = body["token_ids"], body.get("cache_salt")
        if body["sampling_params"].get("prompt_logprobs") is not None:
            return await self._score(prompt)
        if wanted := body["sampling_params"].get("logprob_token_ids"):
            return await self._score_one(prompt, wanted[0], body["sampling_params"]["temperature"])
        if parts := body.get("content_parts"):
            if len(parts) != prompt.count(self.media_token):
                raise web.HTTPBadRequest(text=f"{len(parts)} media for {prompt.count(self.media_token)} placeholders.")
            self.media += [part["url"] for part in parts]
            prompt = [token for given in prompt for token in [given] * (3 if given == self.media_token else 1)]
        sampled = await self._serve_request(http_request, body["request_id"], prompt, body["sampling_params"], salt)
        content = [
            {"token_id": token, "logprob": value}
            for token, value in zip(sampled.tokens, sampled.log_probs, strict=True)
        ]
        if content and self.faults.num_null_log_probs:
            self.faults.num_null_log_probs -= 1
            content[-1]["logprob"] = None
        choice = {
            "index": 0,
            "token_ids": sampled.tokens,
            "finish_reason": sampled.reason,
            "logprobs": {"content": content},
            "weight_versions": [
                {"version": version, "start": start, "end": stop} for version, start, stop in sampled.spans
            ],
        }
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": sampled.num_cached}}
        told = {"prompt_token_ids": prompt} if body.get("return_token_ids") else {}
        return await _answer(choices=[choice], usage=usage, **told)

    async def _score(self, prompt: list[int]) -> web.Response:
        """Of each prompt token but the first: that of the next token where it is that, another elsewhere."""
        await self._works()
        rows: list[dict[str, Any] | None] = [None]
        for position in range(1, len(prompt)):
            token, log_prob = self._next_token(prompt[:position], self.weights_digest)
            scored = log_prob if token == prompt[position] else log_prob - UNLIKELIER
            rows.append({str(prompt[position]): {"logprob": scored}})
        return await _answer(choices=[], prompt_logprobs=rows)

    async def _score_one(self, prompt: list[int], wanted: int, temperature: float) -> web.Response:
        """As `_score`, divided by the temperature unless log-probabilities are raw."""
        await self._works()
        token, log_prob = self._next_token(prompt, self.weights_digest)
        scored = log_prob if token == wanted else log_prob - UNLIKELIER
        scored /= 1.0 if self.has_raw_log_probs else temperature
        top = [{"token_id": token, "logprob": log_prob}, {"token_id": wanted, "logprob": scored}]
        content = [{"token_id": token, "logprob": log_prob, "top_logprobs": top}]
        return await _answer(choices=[{"token_ids": [token], "logprobs": {"content": content}}])

    async def _tell_abilities(self, _request: web.Request) -> web.Response:
        self._require_columns()
        abilities = SampleAbilities(self.vocab_size, True, True, self.keeps_version, self.swaps)
        return web.Response(body=msgspec.json.encode(abilities))

    async def _generate_columns(self, http_request: web.Request) -> web.Response:
        self._require_columns()
        call = decode_call(await http_request.read(), http_request.content_type)
        if call.num_candidates > self.vocab_size:
            raise web.HTTPBadRequest(text=f"{call.num_candidates} candidates, allowed: {self.vocab_size}.")
        prompt = np.frombuffer(call.token_ids, "<i4").tolist()
        sampled = await self._serve_request(http_request, call.request_id, prompt, call.sampling, call.cache_salt)
        log_probs = np.asarray(sampled.log_probs, "<f4")
        if len(log_probs) and self.faults.num_null_log_probs:
            self.faults.num_null_log_probs -= 1
            log_probs[-1] = np.nan
        tokens, k = np.asarray(sampled.tokens, "<i4"), call.num_candidates
        answer = SampleAnswer(
            num_candidates=k,
            token_ids=tokens.tobytes(),
            log_probs=log_probs.tobytes(),
            candidate_ids=((tokens[:, None] + np.arange(k, dtype="<i4")) % self.vocab_size).astype("<i4").tobytes(),
            candidate_log_probs=(log_probs[:, None] - 0.5 * np.arange(k)).astype("<f4").tobytes(),
            finish_reason=sampled.reason,
            spans=[Span(*span) for span in sampled.spans],
            num_prompt_tokens=len(prompt),
            num_cached_tokens=sampled.num_cached,
            routes=self._routes(prompt + sampled.tokens, call.routes_from) if sampled.tokens else None,
            nucleus=self._nucleus(sampled) if call.nucleus else None,
            drafts=self._drafts(len(sampled.tokens)),
        )
        return web.Response(body=msgspec.msgpack.encode(answer))

    async def _stream(self, http_request: web.Request) -> web.StreamResponse:
        """Pieces of five tokens."""
        self._require_columns()
        call = decode_call(await http_request.read(), http_request.content_type)
        prompt = np.frombuffer(call.token_ids, "<i4").tolist()
        answer, sent = web.StreamResponse(), 0

        async def send(sampled: _Sampled, *, is_last: bool) -> None:
            nonlocal sent
            fresh = range(sent, len(sampled.tokens))
            if not is_last and len(fresh) < PIECE_TOKENS:
                return
            piece = stream_piece(
                sampled.tokens[sent:],
                sampled.log_probs[sent:],
                [next(str(version) for version, _, stop in sampled.spans if token < stop) for token in fresh],
                finish_reason=sampled.reason if is_last else None,
                num_prompt_tokens=len(prompt),
                num_cached_tokens=sampled.num_cached,
            )
            sent = len(sampled.tokens)
            if self.faults.dead and http_request.transport is not None:
                http_request.transport.abort()
                raise asyncio.CancelledError
            if not answer.prepared:
                await answer.prepare(http_request)
            await answer.write(encode_frame(piece))
            self.num_pieces += 1

        sampled = await self._serve_request(
            http_request, call.request_id, prompt, call.sampling, call.cache_salt, partial(send, is_last=False)
        )
        await send(sampled, is_last=True)
        await answer.write_eof()
        return answer

    def _require_columns(self) -> None:
        if not self.has_columns:
            raise web.HTTPNotFound

    def _routes(self, tokens: list[int], start: int | None) -> RouteColumn | None:
        """Two layers of four experts, two of which serve a token: a function of the token."""
        if start is None:
            return None
        self._num_routed += 1
        if self.faults.forgets_routes_every and self._num_routed % self.faults.forgets_routes_every == 0:
            return None
        first = np.asarray(tokens[start:-1]).astype(np.uint8)[:, None, None] + np.arange(2, dtype=np.uint8)[:, None]
        rows = ((first + np.arange(2, dtype=np.uint8)) % 4).astype(np.uint8)
        return RouteColumn("|u1", (len(rows), 2, 2), rows.tobytes(), start)

    def _drafts(self, num_tokens: int) -> DraftCounts | None:
        """Each step makes two tokens; of an odd number, the last one comes without a draft."""
        steps = num_tokens // 2
        return DraftCounts(steps * self.num_drafted, steps, steps) if self.num_drafted else None

    def _nucleus(self, sampled: _Sampled) -> NucleusColumn:
        """The sampled token and those after it, equally probable."""
        sizes = np.asarray(sampled.nucleus_sizes, np.int64)
        steps = np.concatenate([np.zeros(0, np.int64), *map(np.arange, sizes)])
        ids = (np.repeat(np.asarray(sampled.tokens, np.int64), sizes) + steps) % self.vocab_size
        log_probs = np.repeat(-np.log(np.maximum(sizes, 1)), sizes)
        return NucleusColumn(
            ids.astype("<i4").tobytes(),
            np.concatenate([[0], np.cumsum(sizes)]).astype("<i8").tobytes(),
            log_probs.astype("<f4").tobytes(),
        )

    async def _serve_request(
        self,
        http_request: web.Request,
        request_id: str,
        prompt: list[int],
        sampling: dict[str, Any],
        salt: str | None,
        show: Callable[[_Sampled], Awaitable[None]] | None = None,
    ) -> _Sampled:
        """`show` sees what there is after each token."""
        if not prompt or any(not 0 <= token < self.vocab_size for token in prompt):
            raise web.HTTPBadRequest(text=f"Token ids must lie in [0, {self.vocab_size}).")
        if tuple(prompt) in self.faults.failing_prompts:
            raise web.HTTPInternalServerError(text="This request was told to fail.")
        if self.faults.num_dropped_connections:
            self.faults.num_dropped_connections -= 1
            if http_request.transport is not None:
                http_request.transport.abort()
            raise asyncio.CancelledError
        await self._admits.wait()
        request = self._requests[request_id] = _Request(http_request.transport)
        self._num_running += 1
        self.num_served += 1
        try:
            return await self._sample(request, prompt, sampling, salt, show)
        finally:
            self._num_running -= 1
            del self._requests[request_id]

    async def _sample(
        self,
        request: _Request,
        prompt: list[int],
        sampling: dict[str, Any],
        salt: str | None,
        show: Callable[[_Sampled], Awaitable[None]] | None,
    ) -> _Sampled:
        sampled = _Sampled()
        limit = min(sampling["max_tokens"], self.max_model_len - len(prompt))
        while len(sampled.tokens) < limit:
            await self._step(request)
            if request.aborted.is_set() or len(sampled.tokens) == self.faults.num_tokens_before_abort:
                sampled.reason = "abort"
                break
            self._require_memory()
            if not sampled.tokens:
                sampled.num_cached = self._use_cache(prompt, salt)
            token, log_prob = self._sampled_token(prompt, sampled.tokens, sampling)
            if not sampled.spans or sampled.spans[-1][0] != self.version:
                sampled.spans.append([self.version, len(sampled.tokens), 0])
            sampled.tokens.append(token)
            sampled.spans[-1][2] = len(sampled.tokens)
            size = 1 + token % 3 if sampling["top_p"] < 1 else 0
            sampled.nucleus_sizes.append(size)
            sampled.log_probs.append(-math.log(size) if size else log_prob)
            if token in sampling["stop_token_ids"] or _ends_with(sampled.tokens, sampling["stop"]):
                sampled.reason = "stop"
                break
            if show is not None and len(sampled.tokens) < limit:
                await show(sampled)
        return sampled

    def _sampled_token(self, prompt: list[int], tokens: list[int], sampling: dict[str, Any]) -> tuple[int, float]:
        """The next token; another one by the seed, and while a stop token may not be sampled."""
        token, log_prob = likeliest = self._next_token(prompt + tokens, self.weights_digest)
        if sampling["seed"] is not None and sampling["temperature"] > 0:
            token = self._next_token([sampling["seed"], *tokens], self.weights_digest)[0]
        if len(tokens) < sampling["min_tokens"]:
            while token in sampling["stop_token_ids"]:
                token = (token + 1) % self.vocab_size
        return likeliest if token == likeliest[0] else (token, log_prob - UNLIKELIER)

    async def _step(self, request: _Request) -> None:
        await asyncio.sleep(self.faults.step_s)
        while not self._running.is_set() and not request.aborted.is_set():
            await asyncio.sleep(0.001)

    async def _works(self) -> None:
        """Once it isn't paused; it can't work without its memory."""
        while not self._running.is_set():
            await asyncio.sleep(0.001)
        self._require_memory()

    def _require_memory(self) -> None:
        if self.asleep:
            raise web.HTTPInternalServerError(text="A request was worked on by an engine that sleeps.")

    def next_token(self, tokens: list[int], weights_digest: str) -> int:
        """The token after `tokens` under the weights of a digest."""
        return self._next_token(tokens, weights_digest)[0]

    @property
    def num_running(self) -> int:
        """Requests for samples that go on."""
        return self._num_running

    @property
    def is_paused(self) -> bool:
        return not self._running.is_set()

    def _next_token(self, tokens: list[int], weights_digest: str) -> tuple[int, float]:
        seed = hashlib.blake2b(f"{weights_digest}:{tokens}".encode(), digest_size=8).digest()
        value = int.from_bytes(seed, "big")
        return value % self.vocab_size, -1.0 - (value % 1000) / 500.0  # so that it and less likely ones stay below 1

    def _use_cache(self, prompt: list[int], salt: str | None) -> int:
        num_cached = 0
        # vLLM always computes the last prompt token itself
        for stop in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
            key = (salt, tuple(prompt[:stop]))
            if key in self.cache and stop < len(prompt):
                num_cached = stop
            self.cache.add(key)
        return num_cached

    async def _abort(self, request: web.Request) -> web.Response:
        wanted = (await request.json()).get("request_ids")
        for request_id, running in self._requests.items():
            if not wanted or f"generate-tokens-{request_id}" in wanted:
                running.aborted.set()
        return await _answer(status="aborted")

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode == "wait":
            self._admits.clear()
            while self._requests:
                await asyncio.sleep(0.001)
        self._running.clear()
        self._admits.set()
        if mode == "abort":
            for running in self._requests.values():
                running.aborted.set()
        return await _answer(status="paused")

    async def _resume(self, _request: web.Request) -> web.Response:
        self._running.set()
        return await _answer(status="resumed")

    async def _sleep(self, request: web.Request) -> web.Response:
        if request.query.get("mode", "abort") == "abort":
            for running in self._requests.values():
                running.aborted.set()
        self.cache.clear()
        self._running.clear()
        self.asleep = {"weights", "kv_cache"}
        self.events.append("sleep")
        return web.Response()

    async def _wake_up(self, request: web.Request) -> web.Response:
        self.asleep -= set(request.query.getall("tags", ["weights", "kv_cache"]))
        self.events.append(f"wake {' '.join(request.query.getall('tags', []))}")
        if not self.asleep:
            self._running.set()
        return web.Response()

    async def _reset_prefix_cache(self, _request: web.Request) -> web.Response:
        if self.faults.keeps_cache:
            return await _answer(success=False)
        self.cache.clear()
        return await _answer(success=True)

    async def _init_transfer(self, request: web.Request) -> web.Response:
        init = parse_group_init((await request.json())["init_info"]["group"])
        for inbox in self._inboxes:
            inbox.join(init)
        return await _answer(message="Weight transfer initialized")

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["method"] == "vime_staging":
            return await _answer(results=[msgspec.to_builtins(inbox.status()) for inbox in self._inboxes])
        if self.faults.num_ignored_stagings:
            self.faults.num_ignored_stagings -= 1
            return await _answer(results=[None])
        wanted = parse_stage_request(msgspec.json.decode(body["kwargs"]["request"], type=dict[str, Any]))
        for inbox in self._inboxes:
            inbox.stage(wanted)
        return await _answer(results=[None])

    async def _start_update(self, _request: web.Request) -> web.Response:
        if self._update_open:
            return await _error(500, "start_weight_update called while a weight update is already active.")
        self._update_open, self._loaded = True, False
        return await _answer(message="Weight update started")

    async def _update(self, request: web.Request) -> web.Response:
        info = (await request.json())["update_info"]
        self._loaded = False
        try:
            if "weights" in self.asleep:
                raise PublicationError("The engine sleeps, it has no weights to change.")
            if not self._update_open:
                raise PublicationError("start_weight_update must be called before update_weights.")
            self.weights_digest = await asyncio.to_thread(self._load, info)
        except (PublicationError, RuntimeError) as error:
            self._update_open = False
            return await _error(500, str(error))
        self._loaded = True
        self.events.append("load")
        return await _answer(message="Weights updated")

    async def _swap(self, request: web.Request) -> web.Response:
        """Between two steps: no token is made meanwhile; after a failure none is made any more."""
        label = (await request.json())["version"]
        try:
            digest = self._load(msgspec.to_builtins(LoadStaged(int(label))))
        except PublicationError as error:
            self._running.clear()
            return await _error(500, str(error))
        self.weights_digest, self.version = digest, label
        self.events.append("swap")
        return await _answer(version=label)

    def _load(self, info: dict[str, Any]) -> str:
        match parse_update(info):
            case LoadStaged(version):
                tensors = self._from_all(lambda inbox: list(inbox.take(version)))
            case LoadStream():
                tensors = self._from_all(lambda inbox: inbox.receiver().receive())
            case RememberHeld():
                self._noted = self.weights_digest
                return self.weights_digest
            case _:
                if self.weights_digest != self._noted:
                    raise PublicationError("1 tensors differ from those that the engine was started with.")
                return self.weights_digest
        if self.faults.num_failed_updates:
            self.faults.num_failed_updates -= 1
            self.weights_digest = "a mix"
            raise PublicationError("The update was told to fail.")
        missing = sorted(self.required_names - {name for name, _ in tensors})
        if missing:
            self.weights_digest = "a mix"
            raise PublicationError(f"The weights don't fill {len(missing)} layers of the model, first {missing[0]}.")
        return _digest(tensors)

    def _from_all(self, receive: Callable[[WeightInbox], NamedTensors]) -> NamedTensors:
        """What every worker has received at once; raises `PublicationError` when they differ."""
        with ThreadPoolExecutor(len(self._inboxes)) as pool:
            found = list(pool.map(receive, self._inboxes))
        if len({_digest(tensors) for tensors in found}) != 1:
            raise PublicationError("Workers of the engine got different weights.")
        return found[0]

    async def _finish_update(self, request: web.Request) -> web.Response:
        if not self._update_open or not self._loaded:
            return await _error(500, "No verified weights have been loaded in this update; the version stays.")
        self._update_open = False
        if not self.keeps_version:
            self.version = (await request.json())["weight_version"]
        return await _answer(message="Weight update finished")


def _ends_with(tokens: list[int], stop: list[str]) -> bool:
    text = "".join(token_text(token % VOCAB_SIZE) for token in tokens)
    return any(text.endswith(end) for end in stop)


async def _answer(**content: Any) -> web.Response:
    return web.json_response(content)


async def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def _digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = WeightDigest()
    for name, tensor in tensors:
        digest.add(name, tensor)
    return digest.hexdigest()
