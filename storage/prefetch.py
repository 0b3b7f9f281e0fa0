"""Loading ahead in the background, a bounded number of things at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

_Loaded = TypeVar("_Loaded")


class Prefetcher(Generic[_Loaded]):
    """Loads numbered things in order, up to `ahead` of them before they are asked for, on one thread.

    Each thing is kept until it has been taken once; taken again, it is loaded again.
    """

    def __init__(self, loads: Sequence[Callable[[], _Loaded]], *, ahead: int) -> None:
        self._loads, self._ahead = loads, ahead
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._started: dict[int, Future[_Loaded]] = {}
        self.waited_s = 0.0
        """Seconds that takers waited."""

    def take(self, number: int) -> _Loaded:
        """Thing `number`, when it is loaded; raises what loading it raised. Begins to load the next ones."""
        for wanted in range(number, min(number + 1 + self._ahead, len(self._loads))):
            if wanted not in self._started:
                self._started[wanted] = self._thread.submit(self._loads[wanted])
        for passed in [other for other in self._started if not number <= other <= number + self._ahead]:
            self._started.pop(passed).cancel()
        asked = time.monotonic()
        try:
            return self._started.pop(number).result()
        finally:
            self.waited_s += time.monotonic() - asked

    def close(self) -> None:
        """Stop loading; waits for what is being loaded."""
        self._thread.shutdown(cancel_futures=True)
        self._started.clear()

    def __enter__(self) -> Prefetcher[_Loaded]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
