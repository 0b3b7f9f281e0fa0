"""No more threads than --rollout-io-concurrency allows read or write at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from storage.bounded_pool import BoundedPool
from storage.contracts import PayloadPool


class Watched:
    """Answers a read or a write when it is let go, and knows how many are at it."""

    def __init__(self) -> None:
        self.at_once = self.most_at_once = 0
        self._changed = threading.Condition()
        self.let_go = threading.Event()

    def read_blob(self, ref: Any) -> bytes:
        with self._changed:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            self._changed.notify_all()
        assert self.let_go.wait(10)
        with self._changed:
            self.at_once -= 1
        return bytes(ref)

    def publish_groups(self, _items: Any, **_named: Any) -> list[Any]:
        return [self.read_blob(b"")]

    def wait_for(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.at_once >= count, timeout=10)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_reads_and_writes_share_a_bound_and_all_get_their_turn(concurrency: int) -> None:
    watched = Watched()
    pool = BoundedPool(cast(PayloadPool, watched), concurrency)
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(pool.read_blob, cast(Any, bytes([number]))) for number in range(6)]
        calls += [threads.submit(pool.publish_groups, [], submission_id="one")]  # type: ignore[arg-type]
        assert watched.wait_for(concurrency)
        watched.let_go.set()
        answers = [call.result(10) for call in calls]
    assert answers == [*(bytes([number]) for number in range(6)), [b""]]
    assert watched.most_at_once == concurrency


def test_a_call_that_fails_gives_its_turn_back() -> None:
    class Failing:
        def read_blob(self, _ref: Any) -> bytes:
            raise OSError("gone")

    pool = BoundedPool(cast(PayloadPool, Failing()), 1)
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            pool.read_blob(cast(Any, None))
