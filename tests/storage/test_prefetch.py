"""Things are loaded ahead of their use, a bounded number of them, and errors come where the thing is used."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from storage.prefetch import Prefetcher


class Loads:
    """Loads numbers, and tells which."""

    def __init__(self, count: int) -> None:
        self.started: list[int] = []
        self.all = [partial(self._load, number) for number in range(count)]
        self.reached = {number: threading.Event() for number in range(count)}

    def _load(self, number: int) -> int:
        self.started.append(number)
        self.reached[number].set()
        return 10 * number


def test_the_next_ones_are_loaded_before_they_are_taken_and_no_more() -> None:
    loads = Loads(6)
    with Prefetcher(loads.all, ahead=2) as prefetcher:
        assert prefetcher.take(0) == 0
        assert loads.reached[2].wait(10)
        assert loads.started == [0, 1, 2]
        assert prefetcher.take(1) == 10
        assert loads.reached[3].wait(10)
        assert loads.started == [0, 1, 2, 3]


def test_everything_is_loaded_once_when_taken_in_order() -> None:
    loads = Loads(5)
    with Prefetcher(loads.all, ahead=2) as prefetcher:
        assert [prefetcher.take(number) for number in range(5)] == [0, 10, 20, 30, 40]
    assert loads.started == [0, 1, 2, 3, 4]


def test_a_second_pass_loads_again() -> None:
    loads = Loads(2)
    with Prefetcher(loads.all, ahead=1) as prefetcher:
        assert [prefetcher.take(number) for number in (0, 1, 0, 1)] == [0, 10, 0, 10]


def test_what_was_loaded_ahead_and_passed_over_is_let_go() -> None:
    loads = Loads(5)
    with Prefetcher(loads.all, ahead=1) as prefetcher:
        prefetcher.take(0)
        assert loads.reached[1].wait(10)
        prefetcher.take(3)
        prefetcher.take(1)
    assert loads.started.count(1) == 2


def test_an_error_comes_at_the_thing_that_has_it() -> None:
    def fail() -> int:
        raise ValueError("damaged")

    with Prefetcher([lambda: 0, fail, lambda: 2], ahead=2) as prefetcher:
        assert prefetcher.take(0) == 0
        with pytest.raises(ValueError, match="damaged"):
            prefetcher.take(1)
        assert prefetcher.take(2) == 2


def test_a_closed_prefetcher_loads_nothing_more() -> None:
    loads = Loads(3)
    prefetcher = Prefetcher(loads.all, ahead=0)
    prefetcher.take(0)
    prefetcher.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        prefetcher.take(1)
    assert loads.started == [0]
