"""HTTP calls to an engine or a router: bounded in time, every failure an `EngineError` that says which call it was."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

import aiohttp
import msgspec

from vime.errors import EngineError, EngineUnavailable

_EXCERPT = 500
_KEEPALIVE_S = 2.0


class RouteNotFound(EngineError):
    """There is no such route."""


class Poster(Protocol):
    """Another process that sends requests for samples."""

    async def post(
        self, name: str, address: str, route: str, data: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> bytes:
        """Body of the answer, as `EngineHttp(address, name=name)` gets it. Raises as `EngineHttp.call`."""
        ...


class EngineHttp:
    """Connections to one base URL. Create it inside a running event loop; close it."""

    def __init__(
        self,
        address: str,
        *,
        name: str = "Engine",
        control_timeout_s: float = 60.0,
        max_connections: int = 0,
        poster: Poster | None = None,
    ) -> None:
        """`name` begins error messages; `max_connections` 0 means without limit.

        `poster` sends requests for samples.
        """
        self._name, self._poster = name, poster
        self.address = address.rstrip("/")
        self._control_timeout_s = control_timeout_s
        # vLLM closes a connection after five idle seconds, and after every error: a request that is sent on one just
        # then is lost. So connections are reused for sampling only, and only while they are fresh.
        self._sampling = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=_KEEPALIVE_S)
        )
        self._control = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))

    async def close(self) -> None:
        """Close the connections; running calls fail."""
        await asyncio.gather(self._sampling.close(), self._control.close())

    async def json(self, method: str, route: str, **arguments: Any) -> dict[str, Any]:
        """The answer of `call`, which must be a JSON object."""
        body = await self.call(method, route, **arguments)
        try:
            answer = msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise EngineError(
                f"{self._name} {self.address}: {method} {route} answered {body[:_EXCERPT]!r}: {error}."
            ) from error
        return answer

    async def call(
        self,
        method: str,
        route: str,
        *,
        json: Mapping[str, object] | None = None,
        data: bytes | None = None,
        params: Mapping[str, str] | Sequence[tuple[str, str]] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        samples: bool = False,
    ) -> bytes:
        """Body of an answer with status 200. `samples`: a request for tokens, which may reuse a connection.

        Raises:
            RouteNotFound: status 404.
            EngineUnavailable: no answer in time, a broken connection, or a status from 500 on.
            EngineError: another status.
        """
        payload = msgspec.json.encode(json) if json is not None else data
        if samples and self._poster is not None and payload is not None:
            wait_s = timeout_s or self._control_timeout_s
            return await self._poster.post(self._name, self.address, route, payload, headers or {}, wait_s)
        async with self._answer(method, route, payload, params, headers, timeout_s, samples=samples) as answer:
            return await answer.read()

    async def frames(
        self,
        route: str,
        data: bytes,
        *,
        length_bytes: int,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[bytes]:
        """The frames of an answer to a POST for tokens, as they come: each follows its length in `length_bytes`.

        Closing this breaks the connection. Raises as `call`, and `EngineUnavailable` for an answer that ends inside of
        a frame.
        """
        async with self._answer("POST", route, data, None, headers, timeout_s, samples=True) as answer:
            while not answer.content.at_eof():
                try:
                    length = int.from_bytes(await answer.content.readexactly(length_bytes), "little")
                    yield await answer.content.readexactly(length)
                except asyncio.IncompleteReadError as error:
                    if not error.partial and error.expected == length_bytes:
                        return
                    raise EngineUnavailable(
                        f"{self._name} {self.address}: the answer of POST {route} ends inside of a frame.",
                        next_step=f"See the log of the {self._name.lower()}.",
                    ) from error

    @contextlib.asynccontextmanager
    async def _answer(
        self,
        method: str,
        route: str,
        payload: bytes | None,
        params: Mapping[str, str] | Sequence[tuple[str, str]] | None,
        headers: Mapping[str, str] | None,
        timeout_s: float | None,
        *,
        samples: bool,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """An answer with status 200, its body not read yet; raises as `call`, also for what fails while it is read."""
        sent = {"Content-Type": "application/json"} if payload is not None else {}
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._control_timeout_s, sock_connect=10.0)
        session = self._sampling if samples else self._control
        try:
            async with session.request(
                method,
                self.address + route,
                data=payload,
                params=params,
                headers={**sent, **(headers or {})},
                timeout=timeout,
            ) as answer:
                if answer.status != 200:
                    excerpt = (await answer.read())[:_EXCERPT].decode(errors="replace")
                    raise _kind(answer.status)(
                        f"{self._name} {self.address}: {method} {route} answered {answer.status}: {excerpt}"
                    )
                yield answer
        except TimeoutError as error:
            raise EngineUnavailable(
                f"{self._name} {self.address}: {method} {route} took longer than {timeout.total:g} s.",
                next_step=f"See the log of the {self._name.lower()}; it may be overloaded, paused or stuck.",
            ) from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable(
                f"{self._name} {self.address}: {method} {route} failed: {type(error).__name__}: {error}.",
                next_step=f"Check that the {self._name.lower()} is running.",
            ) from error


def _kind(status: int) -> type[EngineError]:
    if status == 404:
        return RouteNotFound
    return EngineUnavailable if status >= 500 else EngineError
