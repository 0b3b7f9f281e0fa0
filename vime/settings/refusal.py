"""One documented setting that the code can't honour yet."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vime.settings.flag import Flag, Kind
from vime.settings.groups import Settings, all_flags

Condition = Callable[[Settings], Any]
"""The refused value, or None when there is nothing to refuse."""


@dataclass(frozen=True)
class Refusal:
    """One flag, or one condition on several.

    `accepted` says what works now, `reason` why the rest doesn't, `needs` what has to be built. Without `refused_value`
    every value but the flag's default is refused; `accepts` widens or narrows that to other values.
    """

    flag: str
    accepted: str
    reason: str
    needs: str
    accepts: tuple[Any, ...] | None = None
    refused_value: Condition | None = None

    def found(self, settings: Settings) -> str | None:
        """The refused value in `settings`, as shown to the user; None when the setting is honoured."""
        if self.refused_value is not None:
            value = self.refused_value(settings)
            return None if value is None else str(value)
        group, described = _by_name()[self.flag]
        value = vars(vars(settings)[group])[described.field]
        honoured = (described.default,) if self.accepts is None else self.accepts
        return None if value in honoured else _shown(described, value)


def _shown(described: Flag, value: Any) -> str:
    if described.secret:
        return "***"
    if isinstance(value, bool):
        return ""
    return " ".join(str(item) for item in value) if isinstance(value, tuple) else str(value)


@functools.cache
def _by_name() -> dict[str, tuple[str, Flag]]:
    return {described.name: (group, described) for group, described in all_flags().values()}


def unless_default(flags: str, reason: str, needs: str) -> Iterator[Refusal]:
    """Rows for flags of one subject, each of which may only keep its default (an optional switch also be False)."""
    for flag in flags.split():
        described = _by_name()[flag][1]
        default = described.default
        left_out = default is None or default in ({}, ()) or isinstance(default, bool)
        accepts = (None, False) if described.kind is Kind.OPTIONAL_SWITCH else None
        yield Refusal(flag, "left out" if left_out else str(default), reason, needs, accepts=accepts)
