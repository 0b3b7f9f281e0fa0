"""A coordinator, producers and a reader in processes of their own, with nothing but the transport between them."""

from __future__ import annotations

import hashlib
from typing import Any

import ray

from pipeline.transports.carriers import carrier_of
from pipeline.transports.ray_parts import CoordinatorParts, RayParts


class Table:
    """The coordinator's part of the transport."""

    def __init__(self) -> None:
        self._parts = CoordinatorParts()

    async def put_parts(self, references: dict[str, list[Any]]) -> None:
        self._parts.put(references)

    async def get_parts(self, key: str, numbers: list[int]) -> list[Any]:
        return self._parts.get(key, numbers)

    async def release_parts(self, keys: list[str]) -> None:
        self._parts.release(keys)

    async def keep_bytes(self, key: str, content: bytes) -> None:
        """As the coordinator does with prompts and plans."""
        self._parts.put({key: [content]})

    async def kinds(self, key: str) -> set[str]:
        """Types of what this process holds of a key with three parts."""
        return {type(part).__name__ for part in self._parts.get(key, [0, 1, 2])}


class User:
    """A process that puts or gets payloads."""

    def __init__(self, table: Any, transport: str) -> None:
        self._parts = RayParts(table, carrier_of(transport))

    def put(self, key: str, fill: int, sizes: list[int]) -> None:
        self._parts.put({key: [bytes([fill]) * size for size in sizes]})

    def digests(self, key: str, numbers: list[int]) -> list[str]:
        return [hashlib.sha256(part).hexdigest() for part in self._parts.get(key, numbers)]

    def release(self, keys: list[str]) -> None:
        self._parts.release(keys)


def spawn(actor: type, *args: Any) -> Any:
    return ray.remote(num_cpus=0)(actor).remote(*args)


def digest(fill: int, size: int) -> str:
    return hashlib.sha256(bytes([fill]) * size).hexdigest()
