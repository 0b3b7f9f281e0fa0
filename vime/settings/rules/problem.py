"""One thing in the settings that can't work, and how it is told."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from vime.settings.flag import Flag, Kind
from vime.settings.groups import Settings, all_flags


@dataclass(frozen=True)
class Problem:
    """Why settings can't work.

    `flags` are the flags involved; `found` shows them with their values; `allowed` says what would do, `reason` why,
    and `next_step` is one sentence that tells the user what to change.
    """

    flags: tuple[str, ...]
    found: str
    allowed: str
    reason: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.found}, allowed: {self.allowed}. {self.reason}".strip()


def problem(
    settings: Settings, flags: str, *, allowed: str, reason: str, next_step: str, found: str | None = None
) -> Problem:
    """Problem with the named flags (separated by spaces); what was found is read from the settings."""
    names = tuple(flags.split())
    return Problem(names, shown(settings, flags) if found is None else found, allowed, reason, next_step)


def shown(settings: Settings, flags: str) -> str:
    """Flags with their values: "--kl-coef 0.1 without --ref-load"; one flag alone: "--kl-coef is 0.1"."""
    first, *others = flags.split()
    typed = _typed(settings, first)
    if not others:
        return f"{first} is left out" if typed is None else typed.replace(" ", " is ", 1)
    words = f"No {first}" if typed is None else typed
    for name in others:
        typed = _typed(settings, name)
        words += f" without {name}" if typed is None else f" with {typed}"
    return words


def _typed(settings: Settings, name: str) -> str | None:
    """The flag as it is typed for its value; None when it is left out."""
    group, described = _flags_by_name()[name]
    value: Any = vars(vars(settings)[group])[described.field]
    if described.kind is Kind.SWITCH:
        return name if value != described.inverted else None
    if value is None or value == ():
        return None
    if described.kind is Kind.OPTIONAL_SWITCH:
        return name if value else f"--no-{name[2:]}"
    shown_value = "***" if described.secret else " ".join(map(str, value if isinstance(value, tuple) else (value,)))
    return f"{name} {shown_value}"


@functools.cache
def _flags_by_name() -> dict[str, tuple[str, Flag]]:
    return {described.name: (group, described) for group, described in all_flags().values()}
