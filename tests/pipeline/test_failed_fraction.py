"""When a run stops for what was set aside."""

from pathlib import Path

import pytest

from pipeline.failed_fraction import check_failed_fraction, check_some_accepted
from storage.dead_letters import DeadLetterBox, letters_folder
from vime.errors import RewardError, TooManyFailuresError

RUN = Path("/runs/a")


def test_a_small_run_goes_on_whatever_fraction_failed() -> None:
    check_failed_fraction({"reward_none": 7}, 7, allowed=0.2, run=RUN)


def test_the_fraction_that_is_allowed_stops_nothing() -> None:
    check_failed_fraction({"reward_none": 8}, 40, allowed=0.2, run=RUN)
    check_failed_fraction({"reward_none": 8}, 8, allowed=1.0, run=RUN)


def test_more_stops_the_run_and_names_the_frequent_reasons_and_the_command_that_lists_them() -> None:
    dropped = {"engine": 1, "reward_none": 2, "reward_timeout": 5, "sample": 1}
    with pytest.raises(TooManyFailuresError) as caught:
        check_failed_fraction(dropped, 40, allowed=0.2, run=RUN)
    assert caught.value.message == (
        "9 of 40 groups were set aside, more than --rollout-max-failed-fraction 0.2 allows. "
        "Most frequent reasons: reward_timeout (5), reward_none (2), engine (1)."
    )
    assert "vime queue dead /runs/a" in caught.value.next_step


def test_the_newest_failure_of_the_most_frequent_reason_is_told(tmp_path: Path) -> None:
    box = DeadLetterBox(letters_folder(tmp_path), "producer-0")
    for reason, words in [("reward_raised", "the reward raised\nKeyError"), ("engine", "it is gone")]:
        error = RewardError(words)
        box.put(error, reason=reason, group_index=0, attempt=1, samples=[], prompt_ref=None, payload_ref=None)
    with pytest.raises(TooManyFailuresError) as caught:
        check_failed_fraction({"reward_raised": 9, "engine": 1}, 10, allowed=0.2, run=tmp_path)
    assert caught.value.message.endswith(" The newest reward_raised: the reward raised KeyError")
    assert f"`vime queue dead {tmp_path} --traces`" in caught.value.next_step


def test_a_run_that_accepted_nothing_stops_with_the_reasons_whatever_fraction_may_fail() -> None:
    with pytest.raises(TooManyFailuresError) as caught:
        check_some_accepted({"reward_raised": 9, "zero_std": 7}, 0, batch=4, run=RUN)
    assert caught.value.message == (
        "0 of 16 groups were accepted. Most frequent reasons: reward_raised (9), zero_std (7)."
    )
    assert "Correct the reward or the filter" in caught.value.next_step


def test_a_run_that_accepted_something_or_has_tried_little_goes_on() -> None:
    check_some_accepted({"reward_raised": 400}, 1, batch=4, run=RUN)
    check_some_accepted({"reward_raised": 15}, 0, batch=4, run=RUN)
    check_some_accepted({"reward_raised": 7}, 0, batch=1, run=RUN)
    check_some_accepted({}, 0, batch=4, run=RUN)


def test_letters_that_can_not_be_read_do_not_hide_why_a_run_ends(tmp_path: Path) -> None:
    (letters_folder(tmp_path) / "producer_0.jsonl").mkdir(parents=True)
    with pytest.raises(TooManyFailuresError, match=r"Most frequent reasons: reward_none \(40\)\. Correct"):
        check_some_accepted({"reward_none": 40}, 0, batch=4, run=tmp_path)
