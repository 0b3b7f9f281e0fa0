"""Functions of the user's own, loaded by import path in the process that calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vime.errors import RewardError, SettingsError
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


def call_user_function(flag: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function of that flag returns. Raises `RewardError` for whatever it raises."""
    try:
        return function(*arguments)
    except Exception as error:  # the boundary to user code
        raise RewardError(
            f"{flag} raised {type(error).__name__}: {error}.", next_step="Correct the function."
        ) from error
