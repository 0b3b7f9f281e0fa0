"""Each alarm rings at its threshold, says what it found and what to do, and is silent in a healthy run."""

import math
from typing import Any

import pytest

from pipeline.alarm import MOST_LEVEL, Alarm
from pipeline.alarms import AlarmLimits, find_alarms
from pipeline.incidents import Incident
from tests.support.step_records import step_record

TRAIN = step_record().train


def names(*steps: Any, **more: Any) -> list[str]:
    return [alarm.name for alarm in find_alarms(steps, **more)]


def test_a_healthy_run_has_no_alarm() -> None:
    assert names(*map(step_record, range(30)), dead_letters={}, disk=(90 << 30, 100 << 30)) == []
    assert names() == []


@pytest.mark.parametrize(
    ("name", "changes", "words", "advice"),
    [
        ("gap", {"train": {**TRAIN, "train_rollout_logprob_abs_diff": 0.3}}, "0.3 nats", "vime parity"),
        ("staleness", {"staleness_max": 9}, "9 versions", "--max-staleness"),
        ("replay", {"train": {**TRAIN, "routing_replay_fraction": 0.97}}, "97.0%", "routed experts"),
        ("truncation", {"truncated_share": 0.5}, "50%", "--rollout-max-response-len"),
        ("signal", {"signal_share": 0.05}, "5%", "--dynamic-sampling-filter-path"),
        ("numbers", {"train": {**TRAIN, "loss": math.nan}}, "loss is not finite", "--ckpt-step"),
        ("failures", {"dropped": {"bad_prompt": 3}}, "3 bad_prompt", "--state dropped"),
        ("failures", {"failed_samples": {"reward_timeout": 5}}, "5 reward_timeout", "--traces"),
        ("prefix", {"stale_prefix_share": 0.4}, "Stale prefixes: 40%", "--prefix-cache-salt version"),
        (
            "reward",
            {"reward_time_share": 0.9, "reward": "judges.slow", "wait_s": 8.0},
            "90% of their time in the reward judges.slow",
            "--reward-workers",
        ),
        (
            "replay",
            {"alarms": ["Routes were replayed for 100.0% of the tokens; 1 sample: 4."]},
            "1 sample: 4",
            "Routes",
        ),
        ("batch", {"alarms": ["Sample 7 is odd."]}, "Sample 7 is odd.", "Look"),
        ("records", {"unwritten": ["The token log lacks 1 batch."]}, "The token log lacks 1 batch.", "Free space"),
    ],
)
def test_an_alarm_names_what_was_found_and_what_to_do(name: str, changes: Any, words: str, advice: str) -> None:
    found = find_alarms([step_record(2, **changes), step_record(3, **changes)])
    assert [alarm.name for alarm in found] == [name]
    assert words in found[0].text
    assert advice in found[0].what_to_do


def test_samples_without_routes_are_named_by_the_replay_alarm() -> None:
    told = "Routes were replayed for 97.0% of the tokens of the last step; 1 sample without routes: 12."
    found = find_alarms([step_record(train={**TRAIN, "routing_replay_fraction": 0.97}, alarms=[told])])
    assert [alarm.name for alarm in found] == ["replay"]
    assert "12" in found[0].text


def test_rewards_that_are_all_the_same_have_the_user_read_a_response() -> None:
    same = {"signal_share": 0.0, "reward_std": 0.0, "reward_mean": 0.0}
    (alarm,) = find_alarms([step_record(n, **same) for n in range(7)])
    assert alarm.text == "Every sample of the last 5 batches got the reward 0, so nothing is learned."
    assert "`vime sample show RUN 0`" in alarm.what_to_do
    (alarm,) = find_alarms([step_record(0, **same), step_record(1, **{**same, "reward_mean": 1.0})])
    assert alarm.text.startswith("Rewards differ in 0% of the groups")


def test_a_slow_reward_that_nobody_waits_for_is_no_alarm() -> None:
    assert names(*(step_record(n, reward_time_share=0.9, wait_s=1.0) for n in range(2))) == []


def test_the_first_batch_says_nothing_of_the_reward() -> None:
    slow = {"reward_time_share": 0.9, "wait_s": 8.0}
    assert names(step_record(0, **slow)) == []
    assert names(step_record(0, **slow), step_record(1, **slow)) == ["reward"]


def test_incidents_come_first_with_their_own_advice() -> None:
    incident = Incident(5.0, "engine", "http://e", "Engine 0 gets no requests: gone.", "See its log.")
    found = find_alarms([step_record(truncated_share=0.9)], incidents=[incident])
    assert [alarm.name for alarm in found] == ["engine", "truncation"]
    assert (found[0].text, found[0].what_to_do) == (incident.text, incident.what_to_do)


def test_the_further_past_its_threshold_the_higher_the_level() -> None:
    def level(**changes: Any) -> float:
        (alarm,) = find_alarms([step_record(3, **changes)])
        return alarm.level

    assert level(truncated_share=0.5) == 2.0
    assert level(signal_share=0.025) == 4.0
    assert level(signal_share=0.0) == MOST_LEVEL, "finite, since JSON has no infinity"
    assert level(train={**TRAIN, "routing_replay_fraction": 0.5}) == 2.0
    assert str(Alarm("gap", "It is 1.", "Lower it.")) == "gap: It is 1. Lower it."


def test_entropy_alarms_when_it_falls_to_a_fraction_of_the_beginning() -> None:
    def steps(last: float) -> list[Any]:
        return [step_record(n, train={**TRAIN, "entropy_loss": 1.0 if n < 10 else last}) for n in range(20)]

    assert names(*steps(0.25)) == []
    assert names(*steps(0.15)) == ["entropy"]
    assert names(*steps(0.15)[-6:]) == [], "too few batches to tell"


def test_one_outlier_of_a_share_is_no_alarm() -> None:
    steps = [step_record(n, truncated_share=1.0 if n == 9 else 0.0) for n in range(10)]
    assert names(*steps) == []
    assert names(*steps, limits=AlarmLimits(window=1)) == ["truncation"]


def test_little_free_disk_is_an_alarm_without_any_batch() -> None:
    (alarm,) = find_alarms([], disk=(1 << 30, 100 << 30))
    assert alarm.name == "disk"
    assert "1.0 GiB of 100.0 GiB" in alarm.text
    assert "--rollout-queue-online-gc" in alarm.what_to_do


def test_failures_of_the_queue_count_before_those_of_the_newest_batch() -> None:
    (alarm,) = find_alarms([step_record(failed_samples={})], dead_letters={"reward_raised": 2, "nan_reward": 7})
    assert alarm.text.startswith("Failed samples: 7 nan_reward, 2 reward_raised;")


def test_the_most_frequent_failure_is_told_with_its_newest_message() -> None:
    messages = {"engine_error": "routes of 0 tokens came, allowed: 12.", "other": "no"}
    (alarm,) = find_alarms([], dead_letters={"other": 1, "engine_error": 3}, messages=messages)
    assert alarm.text.endswith("routes of 0 tokens came, allowed: 12.")


def test_a_stall_is_the_first_alarm_and_names_its_last_link() -> None:
    chain = "step 41 waits for 3 groups <- 2 in reward, oldest 94 s: judge"
    found = find_alarms([step_record(truncated_share=0.9)], stall=(94.0, chain))
    assert [alarm.name for alarm in found] == ["stall", "truncation"]
    assert "94 s" in found[0].text
    assert found[0].text.endswith("judge.")
