"""Filters and searches over samples."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vime.errors import SettingsError
from vime.view.sample_index import MOST_CHARACTERS, Condition, Planned, SampleIndex, SampleQuery, SampleRow

SERVER_TIME_S = 0.3
"""For one answer over 100,000 samples."""


def row(index: int, **changes: Any) -> SampleRow:
    values: dict[str, Any] = {
        "sample_index": index, "group_index": index // 4, "member": index % 4, "state": "pending", "source": "math",
        "status": "completed", "reward": float(index % 4), "prompt_tokens": 3, "response_tokens": 10 + index,
        "trained_tokens": 10, "min_version": 1, "max_version": 2, "prompt": f"What is {index // 4} plus one?",
        "response": f"It is {index // 4 + 1}.",
    }  # fmt: skip
    return SampleRow(**{**values, **changes})


@pytest.fixture
def index(tmp_path: Path) -> Iterator[SampleIndex]:
    with SampleIndex(tmp_path / "samples.sqlite") as index:
        index.add([row(number) for number in range(40)])
        yield index


def found(index: SampleIndex, **query: Any) -> list[int]:
    page = index.page(SampleQuery(**query))
    assert len(page.rows) == min(page.num_matching, 100)
    return [entry["sample_index"] for entry in page.rows]


def test_newest_come_first_a_page_at_a_time(index: SampleIndex) -> None:
    page = index.page(SampleQuery(offset=10, limit=5))
    assert [entry["sample_index"] for entry in page.rows] == [29, 28, 27, 26, 25]
    assert page.num_matching == len(index) == 40


def test_text_is_found_anywhere_in_prompt_or_response_in_either_case(index: SampleIndex) -> None:
    assert found(index, text="is 7 PLUS") == [31, 30, 29, 28]
    assert found(index, text="t is 7.") == [27, 26, 25, 24]
    assert found(index, text='"quoted" OR NOT') == []
    with pytest.raises(SettingsError, match="at least 3 characters"):
        index.page(SampleQuery(text="is"))


def test_filters_and_orders_combine(index: SampleIndex) -> None:
    conditions = (Condition("reward", "greaterThan", (1,)), Condition("sample_index", "inRange", (8, 15)))
    assert found(index, conditions=conditions, order=(("reward", "descending"), ("sample_index", "ascending"))) == [
        11, 15, 10, 14,
    ]  # fmt: skip
    assert found(index, conditions=(Condition("state", "contains", ("train",)),)) == []


@pytest.mark.parametrize(
    "condition", [Condition("reward; DROP TABLE samples", "equals", (1,)), Condition("reward", "x")]
)
def test_a_column_or_comparison_that_there_is_none_of_is_refused(index: SampleIndex, condition: Condition) -> None:
    with pytest.raises(SettingsError, match="allowed"):
        index.page(SampleQuery(conditions=(condition,)))


def test_plans_and_states_are_noted_later(index: SampleIndex) -> None:
    index.plan([Planned(5, 2, -0.5, 1)])
    index.set_states({1: "trained"})
    index.set_mean_gaps({5: 0.25})
    assert found(index, conditions=(Condition("mean_gap", "greaterThan", (0.2,)),)) == [5]
    assert found(index, conditions=(Condition("state", "equals", ("trained",)),)) == [7, 6, 5, 4]
    (planned,) = index.page(SampleQuery(conditions=(Condition("advantage", "lessThan", (0,)),))).rows
    assert (planned["sample_index"], planned["rollout"], planned["age_versions"]) == (5, 2, 1)
    index.forget_plans()
    assert found(index, conditions=(Condition("mean_gap", "notBlank"),)) == []
    assert found(index, conditions=(Condition("advantage", "notBlank"),)) == []


def test_the_middle_of_a_long_text_is_left_out(index: SampleIndex) -> None:
    index.add([row(100, response="begin" + "x" * 2 * MOST_CHARACTERS + "finish")])
    (long,) = index.page(SampleQuery(text="finish")).rows
    assert len(long["response"]) < 1.1 * MOST_CHARACTERS
    assert long["response"].startswith("begin")


def test_threads_that_read_leave_no_open_file_behind(index: SampleIndex) -> None:
    index.page(SampleQuery())
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(8):
        thread = threading.Thread(target=index.page, args=[SampleQuery()])
        thread.start()
        thread.join()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_thousand_samples_are_filtered_and_searched_in_no_time(tmp_path: Path) -> None:
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 9))) for _ in range(3000)]
    with SampleIndex(tmp_path / "samples.sqlite") as index:
        for first in range(0, 100_000, 5000):
            index.add(
                row(
                    number, reward=chance.random(), status=chance.choice(["completed", "truncated"]),
                    response=" ".join(chance.choices(words, k=40)),
                )
                for number in range(first, first + 5000)
            )  # fmt: skip
        index.plan(Planned(number, number // 256, chance.gauss(0, 1), 1) for number in range(90_000))
        cut_off = Condition("status", "equals", ("truncated",))
        for query in (
            SampleQuery(),
            SampleQuery(text=words[0] + " "),
            SampleQuery(text=words[1][:3], order=(("reward", "descending"),)),
            SampleQuery(text="What is", offset=50_000),
            SampleQuery(conditions=(cut_off, Condition("reward", "lessThan", (0.1,)))),
            SampleQuery(order=(("advantage", "descending"),)),
            SampleQuery(order=(("response_tokens", "ascending"), ("reward", "descending")), offset=99_000),
        ):  # fmt: skip
            took = min(_seconds(index, query) for _ in range(3))
            print(f"{1000 * took:.1f} ms: {query}")
            assert took < SERVER_TIME_S, query


def _seconds(index: SampleIndex, query: SampleQuery) -> float:
    """Processor time: SQLite works in the thread that asks, and how long that waits for a core is not its doing."""
    began = time.thread_time()
    page = index.page(query)
    took = time.thread_time() - began
    assert page.rows
    return took
