"""A resource that failed is replaced for all who use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from straw import errors

from storage import live
from storage.live import Live
from vime.errors import CorruptDataError, StorageError


class Opened:
    """Numbers the resources, and remembers which were closed."""

    def __init__(self) -> None:
        self.count = 0
        self.closed: list[int] = []

    @contextmanager
    def open(self) -> Iterator[int]:
        self.count += 1
        number = self.count
        yield number
        self.closed.append(number)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "sleep", lambda _: None)


@pytest.fixture
def opened() -> Opened:
    return Opened()


def failing_at_first(error: Exception) -> Callable[[int], int]:
    def work(resource: int) -> int:
        if resource == 1:
            raise error
        return resource

    return work


def test_it_is_opened_at_the_first_call_and_kept(opened: Opened) -> None:
    resource = Live(opened.open, Path("pool"))
    assert opened.count == 0
    assert [resource.call("read", lambda number: number) for _ in range(3)] == [1, 1, 1]
    resource.close()
    assert opened.closed == [1]


@pytest.mark.parametrize(
    "error", [OSError(9, "Bad file descriptor"), errors.StorageUnavailable("x"), errors.IndeterminateCommit("x")]
)
def test_a_failed_one_is_closed_and_the_call_repeated_with_a_fresh_one(opened: Opened, error: Exception) -> None:
    resource = Live(opened.open, Path("pool"))
    assert resource.call("read", failing_at_first(error)) == 2
    assert opened.closed == [1]


def test_damage_is_not_a_failure_of_the_store(opened: Opened) -> None:
    resource = Live(opened.open, Path("pool"))
    with pytest.raises(CorruptDataError):
        resource.call("read", failing_at_first(errors.CorruptData("x")))
    assert (opened.count, opened.closed) == (1, [])


def test_a_call_whose_resource_another_thread_replaced_is_repeated(opened: Opened) -> None:
    resource = Live(opened.open, Path("pool"))

    def work(number: int) -> int:
        if number == 1:
            resource.renew()  # as a failing call of another thread does
            raise RuntimeError("Reader is closed")
        return number

    assert resource.call("read", work) == 2
    with pytest.raises(RuntimeError, match="a fault of the caller"):
        resource.call("read", lambda _: fault_of_the_caller())


def fault_of_the_caller() -> int:
    raise RuntimeError("a fault of the caller")


def test_a_closed_one_is_not_opened_again(opened: Opened) -> None:
    resource = Live(opened.open, Path("pool"))
    resource.close()
    with pytest.raises(StorageError, match="The pool pool is closed"):
        resource.call("read", lambda number: number)
    assert opened.count == 0


def test_a_hopeless_call_is_not_repeated(opened: Opened) -> None:
    resource = Live(opened.open, Path("pool"))
    with pytest.raises(StorageError, match="read: gone"):
        resource.call("read", failing_at_first(errors.StorageUnavailable("gone")), hopeless=lambda: True)
    assert opened.count == 1
