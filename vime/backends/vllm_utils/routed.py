"""Requests for samples through a router, which sends all of one session to one engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from vime.backends.vllm_utils import wire_columns
from vime.backends.vllm_utils.engine_http import EngineHttp, Poster
from vime.backends.vllm_utils.media_request import generate_with_media
from vime.backends.vllm_utils.protocol import GeneratedPiece, GenerateRequest, GenerateResult
from vime.backends.vllm_utils.sample_stream import sample_stream
from vime.errors import EngineError, EngineUnavailable

SESSION_HEADER = "x-session-id"
"""What vllm-router's policy consistent_hash hashes first."""


LIVENESS_S = 5.0
"""How long a router may take to say that it is there."""


class RoutedClient:
    """Connections to one router before engines with vime's sample route. Create it inside a running event loop."""

    def __init__(self, address: str, *, generate_timeout_s: float = 3600.0, poster: Poster | None = None) -> None:
        """`address` is the router's base URL; `poster` sends the requests."""
        self._http = EngineHttp(address, name="Router", poster=poster)
        self.address = self._http.address
        self._generate_timeout_s = generate_timeout_s

    async def close(self) -> None:
        """Close the connections; running calls fail."""
        await self._http.close()

    async def answers(self) -> bool:
        """Whether the router itself answers, whatever its engines do."""
        try:
            await self._http.call("GET", "/liveness", timeout_s=LIVENESS_S)
        except EngineUnavailable:
            return False
        except EngineError:
            return True
        return True

    def session(self, session_id: str) -> RoutedSession:
        """The engines as one session sees them."""
        return RoutedSession(self, session_id)

    async def generate(self, request: GenerateRequest, session_id: str) -> GenerateResult:
        """As `EngineClient.generate`, at the engine that the router chooses."""
        headers = {SESSION_HEADER: session_id}
        if request.media:
            return await generate_with_media(self._http, request, timeout_s=self._generate_timeout_s, headers=headers)
        body = await self._http.call(
            "POST",
            wire_columns.SAMPLE,
            data=wire_columns.encode_call(request),
            headers=headers,
            timeout_s=self._generate_timeout_s,
            samples=True,
        )
        return wire_columns.decode_answer(body, request)

    def stream(self, request: GenerateRequest, session_id: str) -> AsyncGenerator[GeneratedPiece]:
        """As `EngineClient.stream`, at the engine that the router chooses."""
        return sample_stream(self._http, request, {SESSION_HEADER: session_id}, self._generate_timeout_s)


class RoutedSession:
    """What takes the place of an engine for requests that belong together."""

    def __init__(self, client: RoutedClient, session_id: str) -> None:
        self._client, self.session_id = client, session_id
        self.address = client.address

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """See `RoutedClient.generate`."""
        return await self._client.generate(request, self.session_id)

    def stream(self, request: GenerateRequest) -> AsyncGenerator[GeneratedPiece]:
        """See `RoutedClient.stream`."""
        return self._client.stream(request, self.session_id)
