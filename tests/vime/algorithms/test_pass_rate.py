"""pass@k against a count of all subsets."""

from itertools import combinations

import pytest

from vime.algorithms.pass_rate import pass_at_k, pass_rates


def counted(num_answers: int, num_correct: int, k: int) -> float:
    """Share of the subsets of k answers that hold a right one."""
    answers = [number < num_correct for number in range(num_answers)]
    subsets = list(combinations(answers, k))
    return sum(map(any, subsets)) / len(subsets)


def test_the_estimate_is_the_share_of_subsets_with_a_right_answer() -> None:
    for num_answers in range(1, 9):
        for num_correct in range(num_answers + 1):
            for k in range(1, num_answers + 1):
                expected = counted(num_answers, num_correct, k)
                assert pass_at_k(num_answers, num_correct, k) == pytest.approx(expected)


def test_only_a_reward_of_one_is_right() -> None:
    assert pass_rates([[1.0, 0.5, -1.0, 2.0]]) == {1: 0.25, 2: pytest.approx(0.5), 4: 1.0}


def test_a_prompt_with_too_few_answers_is_left_out_of_larger_ks() -> None:
    assert pass_rates([[1.0, 1.0, 1.0], [0.0]]) == {1: 0.5, 2: 1.0}
    assert pass_rates([[], [1.0]]) == {1: 1.0}
    assert pass_rates([[]]) == {}
