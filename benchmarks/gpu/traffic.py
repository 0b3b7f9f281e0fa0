"""Requests that keep an engine busy, and how many tokens it makes meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp

from benchmarks.publish import Admission
from tests.support.tiny_models import CHARACTERS
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import GenerateRequest, Sampling

PROMPT_TOKENS = 64
_GENERATED = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})? ([\d.e+]+)$", re.MULTILINE)
_IDS = itertools.count()


@dataclass(frozen=True)
class Window:
    """Some seconds of an engine's work."""

    seconds: float
    tokens: float
    """Made in them, whatever became of them."""
    thrown_away: int
    """Tokens of requests that were aborted in them."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Traffic:
    """Always as many requests at once as there are lanes; each that ends, or is aborted, is followed by another."""

    def __init__(self, client: EngineClient, admission: Admission, num_lanes: int, num_tokens: int) -> None:
        self._client, self._admission, self._num_lanes, self._num_tokens = client, admission, num_lanes, num_tokens
        self._random = random.Random(0)
        self._thrown_away = 0
        self._stopping = False

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        self._lanes = [asyncio.create_task(self._ask(lane)) for lane in range(self._num_lanes)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stopping = True
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        await self._session.close()

    async def window(self, seconds: float) -> Window:
        """Watch so many seconds. Raises what a request has failed with."""
        thrown_away, (before, started) = self._thrown_away, await self._generated()
        await asyncio.sleep(seconds)
        after, ended = await self._generated()
        self.check()
        return Window(ended - started, after - before, self._thrown_away - thrown_away)

    def check(self) -> None:
        """Raises what a request has failed with."""
        for lane in self._lanes:
            if lane.done():
                lane.result()

    async def _ask(self, lane: int) -> None:
        # Lanes begin with requests of different lengths, so that they don't all end together for ever.
        num_tokens = max(1, self._num_tokens * (lane + 1) // self._num_lanes)
        while not self._stopping:
            await self._admission.open.wait()
            prompt = [3 + self._random.randrange(len(CHARACTERS)) for _ in range(PROMPT_TOKENS)]
            salt = f"v{self._admission.version}"
            sampling = Sampling(num_tokens, ignore_eos=True)
            request = GenerateRequest(f"traffic-{next(_IDS)}", prompt, sampling, cache_salt=salt)
            result = await self._client.generate(request)
            if result.finish_reason == "abort":
                self._thrown_away += len(result.token_ids)
            num_tokens = self._num_tokens

    async def _generated(self) -> tuple[float, float]:
        """Tokens since the engine's start, and when that was."""
        async with self._session.get(f"{self._client.address}/metrics") as answer:
            found = _GENERATED.findall(await answer.text())
        if not found:
            raise RuntimeError(f"{self._client.address}/metrics has no vllm:generation_tokens_total")
        return sum(map(float, found)), time.perf_counter()
