"""Functions of the user's own that a setting names as `package.module.function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from vime.errors import SettingsError


def load_function(flag: str, path: str) -> Callable[..., Any]:
    """The function at an import path.

    Raises:
        SettingsError: the path has no module, the module can't be imported, or it has no such function.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise SettingsError(f"{flag} is {path!r}, allowed: package.module.function.", next_step="Give the full path.")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise SettingsError(
            f"{flag} {path}: {error}.", next_step="Start vime where the module can be imported, or set PYTHONPATH."
        ) from error
    function = vars(module).get(name)
    if not callable(function):
        raise SettingsError(f"{flag} {path}: {module_name} has no function {name!r}.", next_step="Correct the path.")
    loaded: Callable[..., Any] = function
    return loaded
