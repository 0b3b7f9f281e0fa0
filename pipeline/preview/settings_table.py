"""Every flag's resolved value, its default, and where the value comes from. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vime.settings.groups import all_flags
from vime.settings.resolve import Resolved


@dataclass(frozen=True)
class SettingRow:
    """One flag. `source` is default, file:PATH, flag, or derived:REASON; a secret's values are "***"."""

    flag: str
    group: str
    value: Any
    default: Any
    source: str

    @property
    def differs(self) -> bool:
        """Whether the value isn't the default one."""
        return bool(self.value != self.default)


def settings_table(resolved: Resolved) -> list[SettingRow]:
    """All flags in the order of the help."""
    rows = []
    for field, (group, described) in all_flags().items():
        value = vars(vars(resolved.settings)[group])[field]
        shown = "***" if described.secret and value is not None else value
        rows.append(SettingRow(described.name, group, shown, described.default, str(resolved.sources[described.name])))
    return rows
