"""One documented setting that the code can't honour yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vime.settings.groups import Settings

Condition = Callable[[Settings], Any]
"""The refused value, or None when there is nothing to refuse."""


@dataclass(frozen=True)
class Refusal:
    """One flag, or one condition on several.

    `accepted` says what works now, `reason` why the rest doesn't, `needs` what has to be built or tried.
    """

    flag: str
    accepted: str
    reason: str
    needs: str
    refused_value: Condition

    def found(self, settings: Settings) -> str | None:
        """The refused value in `settings`, as shown to the user; None when the setting is honoured."""
        value = self.refused_value(settings)
        return None if value is None else str(value)
