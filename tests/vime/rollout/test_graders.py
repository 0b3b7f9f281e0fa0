"""What each built-in grader calls right, wrong, and no usable label."""

from __future__ import annotations

from typing import Any

import pytest

from vime.errors import RewardError
from vime.rollout.rewards.answers import Answer
from vime.rollout.rewards.boxed import last_boxed
from vime.rollout.rewards.graders import grade
from vime.rollout.rewards.multiple_choice import chosen_letter


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2", "1"),
        (r"\fbox{ x }", " x "),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("no box", None),
    ],
)
def test_the_last_balanced_box_counts(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"The answer is \boxed{0.5}.", r"\frac{1}{2}", 1.0),
        ("First 3, then 4. The answer is 42.", 42, 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{70000}", "70,000", 1.0),
        (r"\boxed{Paris}", "Paris", 1.0),
        (r"\boxed{4}, no, \boxed{5}", ["6", "5"], 1.0),
        (r"\boxed{4}, no, \boxed{5}", "4", 0.0),
        (r"\boxed{8}", "7", 0.0),
        ("", "7", 0.0),
        (r"\boxed{\frac{1}{}", "7", 0.0),
    ],
)
def test_math_compares_values_and_not_spellings(response: str, label: Any, reward: float) -> None:
    assert grade("math", Answer(response, label)) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"<think>\boxed{1}</think> It is \boxed{2}.", 1.0),
        (r"It is \boxed{2}.", 0.0),
        (r"<think>\boxed{2}</think> It is 2.", 0.0),
        (r"<think></think> It is \boxed{3}.", 0.0),
    ],
)
def test_deepscaler_wants_a_box_after_the_thinking(response: str, reward: float) -> None:
    assert grade("deepscaler", Answer(response, "2")) == reward


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("Thus.\nAnswer: 2", True),
        ("Answer: 3\nWait.\nAnswer: $2$", True),
        (r"It is \boxed{2}", True),
        ("Answer: 3", False),
        ("It is 2", False),
        ("Answer: 2" + " and so on" * 40, False),
    ],
)
def test_dapo_reads_the_answer_near_the_end(response: str, right: bool) -> None:
    expected = {"score": 1.0, "acc": 1.0} if right else {"score": -1.0, "acc": 0.0}
    assert grade("dapo", Answer(response, "2")) == expected


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        (r"Option A is wrong. \boxed{C}", "C"),
        (r"\boxed{\text{(b)}}", "B"),
        ("A is tempting, but the answer is (B).", "B"),
        ("Answer: D. I rule out A.", "D"),
        ("**Answer: C**", "C"),
        ("Between A and B I choose B", "B"),
        ("<think>The answer is A.</think> The answer is D", "D"),
        ("The answer is E", None),
        ("I don't know", None),
    ],
)
def test_the_chosen_letter_is_the_one_that_was_decided_for(response: str, letter: str | None) -> None:
    assert chosen_letter(response, "ABCD") == letter


@pytest.mark.parametrize(
    ("label", "metadata"),
    [
        ("B", {}),
        ("b", {}),
        (1, {"choices": ["x", "y"]}),
        ("y", {"choices": ["x", "y"]}),
        ("whatever", {"correct_letter": "B"}),
    ],
)
def test_gpqa_takes_its_label_as_letter_number_or_text(label: Any, metadata: dict[str, Any]) -> None:
    assert grade("gpqa", Answer("The answer is B", label, metadata)) == 1.0
    assert grade("gpqa", Answer("The answer is A", label, metadata)) == 0.0


def test_boxed_graders_look_into_the_last_box_only() -> None:
    assert grade("boxed_f1", Answer(r"never mind \boxed{a b}", "a b")) == 1.0
    assert grade("boxed_math", Answer(r"5, or rather \boxed{\frac{1}{2}}", "0.5")) == 1.0
    assert grade("boxed_deepscaler", Answer(r"\boxed{2}", "2")) == 1.0
    assert grade("boxed_math", Answer("The answer is 2", "2")) == 0.0
    assert grade("boxed_f1", Answer("a b", "a b")) == 0.0


def test_reasoning_gym_scores_by_the_rule_of_the_data_set() -> None:
    tasks = {"reasoning_gym": {"tasks": "chain_sum?seed=3&size=10", "row": 4}}
    answers = ["so <answer> 156 </answer>", "<think>157</think>156", "156", "157", ""]
    assert [grade("reasoning_gym", Answer(text, metadata=tasks)) for text in answers] == [1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("math", Answer("1", None)),
        ("math", Answer("1", "")),
        ("deepscaler", Answer("1", {"a": 1})),
        ("dapo", Answer("1", [])),
        ("gpqa", Answer("A", "E")),
        ("gpqa", Answer("A", 7, {"choices": ["x", "y"]})),
        ("reasoning_gym", Answer("1", "1")),
    ],
)
def test_an_unusable_label_is_the_records_fault_and_not_a_wrong_answer(name: str, answer: Answer) -> None:
    with pytest.raises(RewardError) as caught:
        grade(name, answer)
    assert caught.value.reason == "reward_label"


def test_instructions_are_all_followed_or_not() -> None:
    pytest.importorskip("if_verifiable", reason="IFBench's checks come with vime[ifbench]")
    record = {"instruction_id_list": ["format:no_whitespace", "punctuation:no_comma"], "kwargs": [{}, None]}
    assert grade("ifbench", Answer("one", metadata=record)) == 1.0
    assert grade("ifbench", Answer("one,two", metadata=record)) == 0.0
    for broken in ({}, {"instruction_id_list": ["no:such"], "kwargs": [{}]}):
        with pytest.raises(RewardError):
            grade("ifbench", Answer("one", metadata=broken))
