"""Marks of the tests that run a part of the suite for GPUs in small on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

_Test = TypeVar("_Test", bound=Callable[..., Any])


def slow_part(*, engine: bool = False, multiproc: bool = True, timeout_s: float = 900) -> Callable[[_Test], _Test]:
    """Of a part that starts engines, or several processes."""
    marks = [pytest.mark.slow, pytest.mark.timeout(timeout_s)]
    marks += [pytest.mark.engine] if engine else []
    marks += [pytest.mark.multiproc] if multiproc else []

    def marked(test: _Test) -> _Test:
        for mark in marks:
            test = mark(test)
        return test

    return marked
