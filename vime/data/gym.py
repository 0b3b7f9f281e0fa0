"""Tasks of reasoning-gym by name: `reasoning_gym:chain_sum?seed=1&size=500&min_terms=2`."""

from __future__ import annotations

import json
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from vime.errors import DataError

GYM_PREFIX = "reasoning_gym:"
DEFAULT_SEED = 0
DEFAULT_SIZE = 500


class GymTask(NamedTuple):
    """One task of a data set."""

    question: str
    answer: str


class GymTasks:
    """The tasks of one data set of reasoning-gym; task `row` is a function of the name and `row` alone.

    After `?` come seed (0), size (500) and what the data set's own configuration has; values are JSON, or else text.
    """

    def __init__(self, name: str) -> None:
        """Take the name with or without its prefix. Raises `DataError`."""
        data_set, _, query = name.removeprefix(GYM_PREFIX).partition("?")
        try:
            import reasoning_gym
        except ImportError as error:
            raise DataError(
                f"{GYM_PREFIX}{data_set}: the package reasoning-gym can't be imported: {error}.",
                next_step='Install it: pip install "reasoning-gym==0.1.25".',
            ) from error
        config = {"seed": DEFAULT_SEED, "size": DEFAULT_SIZE, **_config(name, query)}
        try:
            self._tasks = reasoning_gym.create_dataset(data_set, **config)
        except (ValueError, TypeError, AssertionError) as error:
            raise DataError(
                f"{GYM_PREFIX}{data_set}: {error}.",
                next_step="Correct the name of the data set, or what follows the question mark.",
            ) from error
        self.name = name.removeprefix(GYM_PREFIX)
        self.identity = json.dumps({"data_set": data_set, "config": config}, sort_keys=True)
        """Equal for equal tasks."""

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, row: int) -> GymTask:
        entry = self._tasks[row]
        return GymTask(str(entry["question"]), str(entry["answer"]))

    def score(self, answer: str, row: int) -> float:
        """0 to 1, by the data set's own rule."""
        return float(self._tasks.score_answer(answer, self._tasks[row]))


def _config(name: str, query: str) -> dict[str, Any]:
    try:
        pairs = parse_qsl(query, strict_parsing=True, keep_blank_values=True) if query else []
    except ValueError as error:
        raise DataError(f"{name}: {error}.", next_step="Write name?key=value&key=value.") from error
    return {key: _value(text) for key, text in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
