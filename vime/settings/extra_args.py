"""Flags that a user's Megatron takes through an `extra_args_provider`.

The provider is a function that gets an `argparse.ArgumentParser`, adds flags and returns it. Between processes it
travels as its import path, never as the function itself.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

from vime.errors import SettingsError
from vime.settings.import_paths import load_function

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]

FLAG = "--extra-args-provider-path"


def path_of(provider: Provider) -> str:
    """Import path of a provider.

    Raises:
        SettingsError: other processes couldn't import it, because it lies in the script itself or in a function.
    """
    module, name = provider.__module__, provider.__qualname__
    if module == "__main__" or not name.isidentifier():
        raise SettingsError(
            f"The extra_args_provider is {module}.{name}, allowed: a function at the top level of a module that the "
            "trainer's processes can import.",
            next_step="Move it into a module on PYTHONPATH and import it from there.",
        )
    path = f"{module}.{name}"
    if load(path) is not provider:
        raise SettingsError(
            f"The extra_args_provider {path} is another function than the one that was given.",
            next_step="Give the function that its import path names.",
        )
    return path


def load(path: str) -> Provider:
    """The provider at an import path; raises `SettingsError` as `load_function`."""
    return load_function(FLAG, path)


@functools.cache
def flags_added_by(path: str) -> dict[str, str]:
    """Flag -> attribute name, for all flags that the provider adds to a parser.

    Raises:
        SettingsError: it can't be loaded, doesn't return the parser, or adds the same flag twice.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    try:
        returned = load(path)(parser)
    except (argparse.ArgumentError, ValueError, TypeError) as error:
        raise SettingsError(f"{FLAG} {path}: {error}.", next_step="Correct the function.") from error
    if not isinstance(returned, argparse.ArgumentParser):
        raise SettingsError(
            f"{FLAG} {path}: it returns {type(returned).__name__}, allowed: the parser.",
            next_step="End the function with `return parser`.",
        )
    return {flag: action.dest for action in returned._actions for flag in action.option_strings}
