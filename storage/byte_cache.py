"""A cache that is bounded in bytes; what was used longest ago leaves first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any


class ByteCache:
    """Thread-safe. A value larger than the whole cache is not kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, key: Hashable) -> Any:
        """The value, None when it isn't there."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: Any, num_bytes: int) -> None:
        """Keep `value`, which counts as `num_bytes`."""
        if num_bytes > self._max_bytes:
            return
        with self._lock:
            if key in self._values:
                self._num_bytes -= self._values.pop(key)[1]
            self._values[key] = (value, num_bytes)
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                _, (_, freed) = self._values.popitem(last=False)
                self._num_bytes -= freed

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self._num_bytes = 0
