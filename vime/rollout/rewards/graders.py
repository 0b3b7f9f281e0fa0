"""Built-in graders by name. Each is imported where it runs, since some bring large libraries along."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from vime.rollout.rewards.answers import Answer
from vime.rollout.rewards.boxed import last_boxed

Grader = Callable[[Answer], Any]
"""A number, or a dict of numbers. Raises `RewardError` for a record that it can't grade by."""

_MODULES: Mapping[str, str] = {
    "math": "math_answers",
    "deepscaler": "math_answers",
    "dapo": "math_answers",
    "f1": "words",
    "gpqa": "multiple_choice",
    "ifbench": "instructions",
    "reasoning_gym": "gym",
}

GRADERS = frozenset(_MODULES)
RANDOM, REMOTE = "random", "remote_rm"
BUILT_IN = GRADERS | {RANDOM, REMOTE}
"""Values of --rm-type; each also with `BOXED` before it."""
BOXED = "boxed_"


def load_grader(name: str) -> Grader:
    """The grader of a name in `GRADERS`. Raises `ImportError` where its library is not installed."""
    grader: Grader = vars(importlib.import_module(module_of(name)))[name]
    return grader


def module_of(name: str) -> str:
    """Import path of the module of a name in `GRADERS`."""
    return f"vime.rollout.rewards.{_MODULES[name]}"


def grade(name: str, answer: Answer) -> Any:
    """Grade by a name in `GRADERS`, with or without `BOXED` before it. Raises what the grader raises."""
    return load_grader(name.removeprefix(BOXED))(as_graded(name, answer))


def as_graded(name: str, answer: Answer) -> Answer:
    """The answer; with `BOXED` before the name its last box in place of the response, nothing where there is no box.

    Mathematical graders find it as a box that follows the thinking.
    """
    plain = name.removeprefix(BOXED)
    if plain == name:
        return answer
    is_math = _MODULES.get(plain) == "math_answers"
    boxed = last_boxed(answer.response)
    if boxed is None:
        return msgspec.structs.replace(answer, response="")
    return msgspec.structs.replace(answer, response=rf"</think>\boxed{{{boxed}}}" if is_math else boxed)
