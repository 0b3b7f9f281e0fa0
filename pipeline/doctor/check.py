"""One check's result."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Outcome(enum.Enum):
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found, and one next step unless it passed."""

    name: str
    outcome: Outcome
    found: str
    next_step: str = ""


def passed(name: str, found: str) -> Check:
    return Check(name, Outcome.PASS, found)


def warned(name: str, found: str, next_step: str) -> Check:
    return Check(name, Outcome.WARN, found, next_step)


def failed(name: str, found: str, next_step: str) -> Check:
    return Check(name, Outcome.FAIL, found, next_step)
