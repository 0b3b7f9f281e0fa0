"""--use-distributed-post: requests for samples are sent by a process on each node, not by the producer's."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from vime.backends.vllm_utils.engine_http import EngineHttp
from vime.errors import EngineUnavailable


class ForwarderActor:
    """Sends requests from its node. It keeps connections, nothing else: Ray starts it again when it dies."""

    def __init__(self) -> None:
        self._connections: dict[tuple[str, str], EngineHttp] = {}

    async def post(
        self, name: str, address: str, route: str, data: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> bytes:
        """Body of the answer; see `EngineHttp.call`."""
        connection = self._connections.get((name, address))
        if connection is None:
            connection = self._connections[(name, address)] = EngineHttp(address, name=name)
        return await connection.call("POST", route, data=data, headers=headers, timeout_s=timeout_s, samples=True)


class Forwarders:
    """Sends each request through the next of several actors; see `vime.backends.vllm_utils.engine_http.Poster`."""

    def __init__(self, actors: Sequence[Any]) -> None:
        """`actors` are handles of `ForwarderActor`, one at least."""
        self._next = itertools.cycle(actors)

    async def post(
        self, name: str, address: str, route: str, data: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> bytes:
        """Body of the answer. Cancelling the call cancels the request.

        Raises:
            EngineError: as `EngineHttp.call`.
            EngineUnavailable: the process that sent the request ended.
        """
        reference = next(self._next).post.remote(name, address, route, data, dict(headers), timeout_s)
        try:
            body: bytes = await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            raise EngineUnavailable(
                f"{name} {address}: POST {route} failed: the process that forwards requests ended.",
                next_step="It is started again; see the logs of Ray if it keeps ending.",
            ) from error
        return body
