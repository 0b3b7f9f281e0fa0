"""Payloads in Ray's object store: bytes stay where they are made, and the coordinator keeps references to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, OutOfDiskError, RayActorError, RayTaskError

from storage.memory_parts import PartTable
from vime.errors import RunFailedError, StalledError, StorageError

logger = logging.getLogger(__name__)

COORDINATOR_S = 600.0
"""How long the coordinator may take to answer: it may have to start again, and to write to a slow disk."""
FETCH_S = 600.0
"""How long parts may take to come from another node."""
FULL_WAIT_S = 0.5
"""Seconds between attempts to keep something while the store is full."""


class PartCarrier(Protocol):
    """Puts bytes where Ray can move them from."""

    def put(self, part: bytes) -> Any:
        """A reference to the bytes. Raises `ObjectStoreFullError` or `OutOfDiskError` while there is no room."""
        ...

    def get(self, references: Sequence[Any]) -> list[bytes]:
        """The bytes of references that some process put. Raises `GetTimeoutError` after `FETCH_S`."""
        ...


class ObjectStoreCarrier:
    """Ray's object store. Bytes are stored as they are: nothing is pickled."""

    def put(self, part: bytes) -> Any:
        return ray.put(part)

    def get(self, references: Sequence[Any]) -> list[bytes]:
        parts: list[bytes] = ray.get(list(references), timeout=FETCH_S)
        return parts


class RayParts:
    """A `PartStore` of a producer or trainer rank; blocks, so it belongs on a thread.

    The coordinator's table holds a reference for each part. Ray keeps an object that is referred to, spilled to its
    folder on disk when memory is short; what doesn't fit there either is not put: the producer waits.
    """

    def __init__(self, coordinator: Any, carrier: PartCarrier) -> None:
        self._coordinator, self._carrier = coordinator, carrier

    def put(self, entries: Mapping[str, Sequence[bytes]]) -> None:
        """See `PartStore.put`. Waits while the object store is full."""
        references = {key: [self._put_when_there_is_room(part) for part in parts] for key, parts in entries.items()}
        answer_of(self._coordinator.put_parts.remote(references))

    def get(self, key: str, numbers: Sequence[int]) -> list[bytes]:
        """See `PartStore.get`. Raises `StorageError` also when the process that put the part is gone."""
        held = answer_of(self._coordinator.get_parts.remote(key, list(numbers)))
        references = [part for part in held if not isinstance(part, bytes)]
        try:
            fetched = iter(self._carrier.get(references) if references else [])
        except ray.exceptions.ObjectLostError as error:
            raise StorageError(
                f"Publication {key} was lost with the process that made it ({type(error).__name__}).",
                next_step="Run the same command again; it resumes from the newest commit.",
            ) from error
        except GetTimeoutError as error:
            raise StorageError(
                f"Publication {key} did not arrive within {FETCH_S:g} s from the process that made it.",
                next_step="Look at that node and its network; the same command resumes from the newest commit.",
            ) from error
        return [part if isinstance(part, bytes) else next(fetched) for part in held]

    def release(self, keys: Iterable[str]) -> None:
        """See `PartStore.release`."""
        answer_of(self._coordinator.release_parts.remote(list(keys)))

    def _put_when_there_is_room(self, part: bytes) -> Any:
        waited = False
        while True:
            try:
                return self._carrier.put(part)
            except (ObjectStoreFullError, OutOfDiskError) as error:
                if not waited:
                    logger.warning("Ray's object store has no room for %d bytes; waiting: %s", len(part), error)
                waited = True
                time.sleep(FULL_WAIT_S)


CoordinatorParts = PartTable[Any]
"""The coordinator's table: prompts and plans as bytes, samples as references."""


def answer_of(reference: Any) -> Any:
    """Wait for the coordinator's answer; its own errors come out as they were raised."""
    try:
        return ray.get(reference, timeout=COORDINATOR_S)
    except RayTaskError as error:
        raise error.cause from error
    except GetTimeoutError as error:
        raise StalledError(
            f"The queue coordinator did not answer within {COORDINATOR_S:g} s.",
            next_step="Look at its log in the run folder. The same command resumes.",
        ) from error
    except RayActorError as error:
        raise RunFailedError(
            "The queue coordinator died.",
            next_step="Run the same command again; it resumes from the newest commit.",
        ) from error
