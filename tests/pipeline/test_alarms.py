"""Each alarm rings at its threshold, says what it found and what to do, and is silent in a healthy run."""

import math
from typing import Any

import pytest

from pipeline.alarms import AlarmLimits, find_alarms
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
        ("batch", {"alarms": ["Sample 7 is odd."]}, "Sample 7 is odd.", "Look"),
    ],
)
def test_an_alarm_names_what_was_found_and_what_to_do(name: str, changes: Any, words: str, advice: str) -> None:
    found = find_alarms([step_record(3, **changes)])
    assert [alarm.name for alarm in found] == [name]
    assert words in found[0].text
    assert advice in found[0].what_to_do


def test_samples_without_routes_are_named_by_the_replay_alarm() -> None:
    told = "Routes were replayed for 97.0% of the tokens of the last step; 1 sample without routes: 12."
    found = find_alarms([step_record(train={**TRAIN, "routing_replay_fraction": 0.97}, alarms=[told])])
    assert [alarm.name for alarm in found] == ["replay"]
    assert "12" in found[0].text


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


def test_a_stall_is_the_first_alarm_and_names_its_last_link() -> None:
    chain = "step 41 waits for 3 groups <- 2 in reward, oldest 94 s: judge"
    found = find_alarms([step_record(truncated_share=0.9)], stall=(94.0, chain))
    assert [alarm.name for alarm in found] == ["stall", "truncation"]
    assert "94 s" in found[0].text
    assert found[0].text.endswith("judge.")
