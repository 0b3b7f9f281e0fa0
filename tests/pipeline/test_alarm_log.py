"""An alarm is told once, told again when it has got much worse, and told when it is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pipeline.alarm_log import OVER_AFTER, AlarmLog, disk_of
from pipeline.alarms import AlarmLimits
from pipeline.progress import StepRecord
from tests.support.step_records import step_record

EACH_BATCH = AlarmLimits(window=1)


class Told:
    """An alarm log and what it said."""

    def __init__(self, **more: Any) -> None:
        self.notes: list[str] = []
        self.log = AlarmLog(self.notes.append, limits=EACH_BATCH, **more)

    def batch(self, rollout_id: int, **changes: Any) -> list[str]:
        """What is said of a batch."""
        before = len(self.notes)
        self.log.with_alarms(step_record(rollout_id, **changes))
        self.log.tell()
        return self.notes[before:]


def test_an_alarm_that_goes_on_is_told_once_with_what_to_do() -> None:
    told = Told()
    (first,) = told.batch(0, truncated_share=0.3)
    assert first.startswith("alarm: truncation: 30% of the samples were cut off")
    assert "--rollout-max-response-len" in first
    assert [told.batch(n, truncated_share=0.3) for n in range(1, 9)] == [[]] * 8


def test_an_alarm_is_told_again_when_it_is_twice_as_bad_as_when_it_was_told() -> None:
    told = Told()
    told.batch(0, truncated_share=0.3)
    assert told.batch(1, truncated_share=0.5) == []
    (worse,) = told.batch(2, truncated_share=0.6)
    assert worse.startswith("alarm (worse): truncation: 60%")
    assert told.batch(3, truncated_share=0.9) == []


def test_an_alarm_is_over_after_some_batches_without_it_and_new_when_it_comes_back() -> None:
    told = Told()
    told.batch(0, staleness_max=9)
    assert [told.batch(n) for n in range(1, OVER_AFTER)] == [[]] * (OVER_AFTER - 1)
    assert told.batch(OVER_AFTER, staleness_max=9) == [], "one that comes and goes is no news"
    quiet = [told.batch(n) for n in range(OVER_AFTER + 1, 2 * OVER_AFTER + 1)]
    assert quiet == [[]] * (OVER_AFTER - 1) + [["alarm over: staleness."]]
    assert told.batch(20, staleness_max=9)[0].startswith("alarm: staleness")


def test_a_record_carries_what_is_wrong_after_it_and_survives_its_file() -> None:
    log = AlarmLog(print)
    record = log.with_alarms(step_record(0, truncated_share=0.5, signal_share=0.0))
    read = msgspec.json.decode(msgspec.json.encode(record), type=StepRecord)
    assert [alarm.name for alarm in read.standing_alarms] == ["truncation", "signal"]
    assert read.alarm_levels == {"truncation": 2.0, "signal": 1e6}
    assert read == record


def test_the_end_repeats_only_what_is_still_wrong() -> None:
    told = Told()
    told.batch(0, truncated_share=0.5, staleness_max=9)
    told.batch(1, truncated_share=0.5)
    before = len(told.notes)
    told.log.tell_at_end()
    assert [note.partition(". ")[0] for note in told.notes[before:]] == [
        "At end still: truncation: 50% of the samples were cut off at the length limit; alarm above 25%"
    ]


def test_batches_that_were_rolled_back_do_not_count() -> None:
    log = AlarmLog(print)
    for n in range(4):
        log.with_alarms(step_record(n, staleness_max=9))
    assert log.with_alarms(step_record(0)).standing_alarms == []


def test_a_long_run_is_judged_by_its_beginning_and_its_end_alone() -> None:
    log = AlarmLog(print, limits=AlarmLimits(window=2))
    train = step_record().train
    for n in range(50):
        record = log.with_alarms(step_record(n, train={**train, "entropy_loss": 1.0 if n < 2 else 0.1}))
    assert [alarm.name for alarm in record.standing_alarms] == ["entropy"]
    assert len(log._steps) == 4


def test_the_disk_is_looked_at_with_each_batch(tmp_path: Path) -> None:
    told = Told(disk=lambda: (1 << 30, 100 << 30))
    assert told.batch(0)[0].startswith("alarm: disk: 1.0 GiB of 100.0 GiB")
    free_and_total = disk_of(tmp_path)
    assert free_and_total is not None
    assert 0 < free_and_total[0] < free_and_total[1]
    assert disk_of(tmp_path / "none") is None
