"""Where a pool in memory keeps its bytes: the parts of each publication under one key, released together."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from vime.errors import StorageError

_Part = TypeVar("_Part")


class PartStore(Protocol):
    """Parts by key, shared by all processes of a run. Nothing leaves it before it is released."""

    def put(self, entries: Mapping[str, Sequence[bytes]]) -> None:
        """Keep the parts of each key, as one unit; a key that is there already stays as it is."""
        ...

    def get(self, key: str, numbers: Sequence[int]) -> list[bytes]:
        """Some parts of a key. Raises `StorageError` when the key was never put, or released."""
        ...

    def release(self, keys: Iterable[str]) -> None:
        """Forget keys with all their parts; unknown ones are passed over."""
        ...


class PartTable(Generic[_Part]):
    """Parts by key in this process. Thread-safe. With bytes as parts it is a `PartStore`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, tuple[_Part, ...]] = {}

    def put(self, entries: Mapping[str, Sequence[_Part]]) -> None:
        """See `PartStore.put`."""
        with self._lock:
            for key, parts in entries.items():
                self._parts.setdefault(key, tuple(parts))

    def get(self, key: str, numbers: Sequence[int]) -> list[_Part]:
        """See `PartStore.get`."""
        with self._lock:
            parts = self._parts.get(key)
        if parts is None or max(numbers, default=0) >= len(parts):
            found = "is not there" if parts is None else f"has {len(parts)} parts, {list(numbers)} were asked for"
            raise StorageError(
                f"Publication {key} {found}: the queue in memory keeps it until its group is trained or dropped.",
                next_step="Read a group before it is reported as trained.",
            )
        return [parts[number] for number in numbers]

    def release(self, keys: Iterable[str]) -> None:
        """See `PartStore.release`."""
        with self._lock:
            for key in keys:
                self._parts.pop(key, None)

    def __len__(self) -> int:
        """Keys that are kept."""
        return len(self._parts)
