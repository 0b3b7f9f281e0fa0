"""Hooks that flags name by import path: whether they can be imported and called as documented.

Imports what the user's modules import, nothing else.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vime.rollout.hook_signatures import HOOKS, HookSignature
from vime.settings.groups import Settings, all_flags
from vime.settings.rules.problem import Problem

_BUILT_IN = "vime."
"""Paths below it are vime's own; their modules may need torch, so they are not imported here."""


def hook_problems(settings: Settings) -> list[Problem]:
    """What is wrong with the hooks that the settings name."""
    with _working_folder_importable():
        return [problem for field in HOOKS for path in _paths(settings, field) for problem in _check(field, path)]


@contextlib.contextmanager
def _working_folder_importable() -> Iterator[None]:
    """Import as the run's processes do: they search the folder that vime was started in first."""
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before


def named_hooks(settings: Settings) -> list[str]:
    """Flag and path of each hook of the user's own."""
    return [f"{all_flags()[field][1].name} {path}" for field in HOOKS for path in _paths(settings, field)]


def load_hook(flag: str, path: str) -> Any | Problem:
    """The object at `package.module.name`, or why it can't be had."""
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the boundary to user code: importing it may raise anything
        return Problem(
            (flag,),
            f"{flag} {path}: {type(error).__name__}: {error}".rstrip("."),
            f"a module {module_name} that can be imported",
            "",
            "Start vime where the module can be imported, or set PYTHONPATH.",
        )
    if name not in vars(module):
        return Problem(
            (flag,),
            f"{flag} {path}: {module_name} has no {name!r}",
            "the name of a function there",
            f"The module is {module.__file__}.",
            "Correct the path.",
        )
    return vars(module)[name]


def _paths(settings: Settings, field: str) -> tuple[str, ...]:
    value = vars(vars(settings)[all_flags()[field][0]])[field]
    paths = value if isinstance(value, tuple) else () if value is None else (value,)
    return tuple(path for path in paths if not path.startswith(_BUILT_IN))


def _check(field: str, path: str) -> Iterator[Problem]:
    flag, signature = all_flags()[field][1].name, HOOKS[field]
    hook = load_hook(flag, path)
    if isinstance(hook, Problem):
        yield hook
        return
    wrong = _what_is_wrong(hook, signature)
    if wrong is not None:
        name = path.rpartition(".")[2]
        yield Problem((flag,), f"{flag} {path} {wrong}", signature.words(name), "", "Change its definition.")


def _what_is_wrong(hook: Any, signature: HookSignature) -> str | None:
    if not callable(hook):
        return f"is {type(hook).__name__}, not a function"
    if signature.methods and not inspect.isclass(hook):
        return "is not a class"
    missing = [method for method in signature.methods if not callable(inspect.getattr_static(hook, method, None))]
    if missing:
        return f"has no {', '.join(missing)}"
    if inspect.isasyncgenfunction(hook):
        return "yields (it is an async generator)"
    if signature.must_be_async and not _is_async(hook):
        return "is not async"
    if signature.must_be_sync and _is_async(hook):
        return "is async, and its result would never be awaited"
    return _call_problem(hook, signature)


def _is_async(hook: Any) -> bool:
    return inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(type(hook).__call__)


def _call_problem(hook: Any, signature: HookSignature) -> str | None:
    try:
        declared = inspect.signature(hook)
    except (TypeError, ValueError):
        return None  # built in C: its arguments can't be known before the call
    try:
        declared.bind(*signature.positional, **dict.fromkeys(signature.keywords))
    except TypeError as error:
        return f"can't be called as documented ({error})"
    return None
