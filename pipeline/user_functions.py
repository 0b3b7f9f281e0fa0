"""Functions of the user's own, loaded by import path in the process that calls them."""

from __future__ import annotations

from typing import Any

from vime.errors import SettingsError
from vime.rollout.hooks import load_hook
from vime.settings.rules.problem import Problem


def user_function(flag: str, path: str | None) -> Any:
    """The function at `path`, None without one. Raises `SettingsError` when it can't be loaded."""
    if path is None:
        return None
    found = load_hook(flag, path)
    if isinstance(found, Problem):
        raise SettingsError(f"{found.found}, allowed: {found.allowed}.", next_step=found.next_step)
    return found
