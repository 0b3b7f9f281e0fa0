"""--use-distributed-post: requests for samples are sent by a process on each node, not by the producer's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError

from vime.backends.vllm_utils.engine_http import EngineHttp
from vime.errors import EngineUnavailable

REST_S = 10.0
"""How long one that has ended gets no requests: it starts again, unless its node is lost."""


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

    def __init__(self, actors: Sequence[Any], clock: Callable[[], float] = time.monotonic) -> None:
        """`actors` are handles of `ForwarderActor`, one at least; `clock` gives seconds and never goes back."""
        self._actors, self._clock = list(actors), clock
        self._rests_until: dict[Any, float] = {}

    async def post(
        self, name: str, address: str, route: str, data: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> bytes:
        """Body of the answer. Cancelling the call cancels the request.

        Raises:
            EngineError: as `EngineHttp.call`.
            EngineUnavailable: the process that sent the request ended.
        """
        actor = self._next()
        reference = actor.post.remote(name, address, route, data, dict(headers), timeout_s)
        try:
            body: bytes = await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except RayTaskError as error:
            raise error.cause from error
        except (RayActorError, ActorUnschedulableError) as error:
            self._rests_until[actor] = self._clock() + REST_S
            raise EngineUnavailable(
                f"{name} {address}: POST {route} failed: the process that forwards requests ended.",
                next_step="It is started again; see the logs of Ray if it keeps ending.",
            ) from error
        return body

    def _next(self) -> Any:
        """The first that doesn't rest; it goes to the end of the line."""
        now = self._clock()
        actor = next((each for each in self._actors if self._rests_until.get(each, now) <= now), self._actors[0])
        self._actors.remove(actor)
        self._actors.append(actor)
        return actor
