"""A full object store makes the producer wait; nothing is thrown away for it. A reader waits, but not for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, OutOfDiskError

from pipeline.transports import ray_parts
from pipeline.transports.ray_parts import RayParts
from vime.errors import StorageError


class FullCarrier:
    """Has room for one part; a wait frees it."""

    def __init__(self, error: Exception) -> None:
        self.kept: list[bytes] = []
        self.unread = 0
        self._error = error

    def put(self, part: bytes) -> bytes:
        if self.unread:
            raise self._error
        self.unread += 1
        self.kept.append(part)
        return part

    def get(self, references: Sequence[Any]) -> list[bytes]:  # noqa: ARG002
        raise GetTimeoutError("not there")


class NoCoordinator:
    """Takes every entry."""

    class put_parts:
        @staticmethod
        def remote(_: object) -> None:
            return None

    class get_parts:
        @staticmethod
        def remote(_: object, __: object) -> list[object]:
            return [object()]


@pytest.mark.parametrize("error", [ObjectStoreFullError("full"), OutOfDiskError("full")])
def test_a_producer_waits_while_there_is_no_room(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    carrier = FullCarrier(error)
    waits: list[float] = []

    def read_one(seconds: float) -> None:
        waits.append(seconds)
        carrier.unread = 0 if len(waits) % 3 == 0 else 1

    monkeypatch.setattr(ray_parts.time, "sleep", read_one)
    monkeypatch.setattr(ray_parts.ray, "get", lambda *_, **__: None)
    RayParts(NoCoordinator, carrier).put({"a": [b"1", b"22", b"333"]})
    assert carrier.kept == [b"1", b"22", b"333"]
    assert len(waits) == 6
    assert caplog.text.count("has no room for") == 2


def test_samples_that_do_not_arrive_are_named_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_parts.ray, "get", lambda answer, **_: answer)
    with pytest.raises(StorageError, match=r"Publication group:7 did not arrive within 600 s"):
        RayParts(NoCoordinator, FullCarrier(OutOfDiskError("full"))).get("group:7", [0])
