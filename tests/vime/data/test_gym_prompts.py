"""Tasks of reasoning-gym as a prompt file that is made rather than read."""

from __future__ import annotations

import pytest

from vime.data.cursor import PromptCursor
from vime.data.gym import GYM_PREFIX, GymTasks
from vime.data.prompts import PromptSource
from vime.data.record_files import record_places
from vime.errors import DataError
from vime.rollout.rewards.answers import Answer
from vime.rollout.rewards.graders import grade
from vime.settings.rules import data

pytest.importorskip("reasoning_gym", reason="an optional package: requirements/tasks.txt")
NAME = "reasoning_gym:chain_sum?seed=3&size=6&max_terms=2"


def test_a_task_is_a_prompt_whose_label_scores_full_marks() -> None:
    tasks, _ = PromptSource(NAME).take(PromptCursor(), 6)
    assert len({task.prompt for task in tasks}) == 6
    for task in tasks:
        assert grade("reasoning_gym", Answer(task.label, task.label, task.metadata)) == 1.0
        assert grade("reasoning_gym", Answer("zzz", task.label, task.metadata)) < 0.5


def test_the_stream_is_a_function_of_the_name() -> None:
    first, cursor = PromptSource(NAME, shuffle=True).take(PromptCursor(), 4)
    rest, _ = PromptSource(NAME, shuffle=True).take(cursor, 4)
    assert [*first, *rest] == PromptSource(NAME, shuffle=True).take(PromptCursor(), 8)[0]
    assert PromptSource(NAME).dataset_digest() == PromptSource(NAME).dataset_digest()
    assert PromptSource(NAME).dataset_digest() != PromptSource(NAME.replace("seed=3", "seed=4")).dataset_digest()


def test_a_slice_and_a_place_work_as_with_files() -> None:
    source = PromptSource(f"{NAME}@[2:4]")
    assert [task.row for task in source.take(PromptCursor(), 2)[0]] == [2, 3]
    assert record_places(NAME, [5]) == {5: f"{NAME}: task 5"} == {5: source.where(5)}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_task", "Dataset 'no_such_task' not registered"),
        ("chain_sum?sizee=3", "unexpected keyword argument 'sizee'"),
        ("chain_sum?min_terms=9&max_terms=2", "max_terms must be >= min_terms"),
        ("chain_sum?size", "bad query field"),
        ("chain_sum?size=0", "size must be positive"),
    ],
)
def test_a_name_that_makes_no_tasks_is_refused(name: str, words: str) -> None:
    with pytest.raises(DataError, match="reasoning_gym:") as caught:
        PromptSource(GYM_PREFIX + name)
    assert words in caught.value.message


def test_size_and_seed_have_defaults_so_that_a_name_alone_is_one_stream() -> None:
    assert len(GymTasks("chain_sum")) == 500
    assert GymTasks("chain_sum").task(7) == GymTasks("chain_sum?seed=0&size=500").task(7)


def test_settings_and_reader_know_the_same_prefix() -> None:
    assert data.GYM_PREFIX == GYM_PREFIX
