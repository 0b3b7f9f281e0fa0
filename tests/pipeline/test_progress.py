"""What the user reads."""

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from pipeline.progress import ProgressView, StepRecord, bottleneck, finished, step_line, stopped


def record(**changes: Any) -> StepRecord:
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(StepRecord):
        values[field.name] = {
            "branch": "b",
            "dropped": {"reward": 2},
            "failed_samples": {},
            "train": {},
            "alarms": [],
            "reward_time_share": 0.0,
            "standing_alarms": [],
            "alarm_levels": {},
        }.get(field.name, 1)
    return StepRecord(**{**values, "rollout_id": 6, "num_rollout": 20, "reward_mean": 0.25, **changes})


@pytest.mark.parametrize(
    ("trainer", "generator", "words"),
    [
        (0.5, 0.1, "Generation is the bottleneck: the trainer waited 50% of the time"),
        (0.1, 0.5, "Training is the bottleneck: the engines stood idle 50% of the time"),
        (0.12, 0.1, "Both sides keep pace"),
        (
            0.61,
            0.70,
            "Neither side is the bottleneck: the trainer idled 61% and the engines 70% of the time, so for 31%",
        ),
        (0.9, 0.3, "Generation is the bottleneck"),
    ],
)
def test_the_slower_side_is_named(trainer: float, generator: float, words: str) -> None:
    assert words in bottleneck(trainer, generator)


def test_a_step_is_one_plain_line_with_its_numbers() -> None:
    line = step_line(record())
    assert "\n" not in line
    for part in ("step 7/20 (rollout 6)", "reward 0.250", "pending 1 in flight 1 dropped 2"):
        assert part in line


def test_a_session_that_was_stopped_asks_for_the_same_command_and_no_more() -> None:
    assert stopped(4, 20) == "Stopped after 4 of 20 rollouts. To go on, run the same command again."


def test_a_run_at_its_end_says_how_to_look_at_it_and_how_to_get_the_model() -> None:
    words = finished(20, Path("runs/a"))
    assert words.startswith("Trained and committed: 20 rollouts.")
    assert "`vime view runs/a`" in words
    assert "`vime convert runs/a FOLDER --to hf`" in words


def test_plain_output_repeats_no_waiting_line() -> None:
    output = io.StringIO()
    with ProgressView(Console(file=output, force_terminal=False)) as view:
        for _ in range(5):
            view.waiting("engine 0: warming up, 5 s")
        view.step(record())
    assert output.getvalue().count("warming up") == 1
    assert "step 7/20" in output.getvalue()


def test_what_a_start_begins_is_told_however_soon_it_comes() -> None:
    plain, terminal = io.StringIO(), io.StringIO()
    with ProgressView(Console(file=plain, force_terminal=False)) as view:
        view.waiting("engine 0: ready, 5 s")
        view.stage("Producers start.")
    with ProgressView(Console(file=terminal, force_terminal=True, width=80)) as view:
        view.stage("Producers start.")
    assert plain.getvalue().endswith("Producers start.\n")
    assert "Producers start." in terminal.getvalue()


def test_a_reward_that_samples_spend_their_time_in_is_the_bottleneck_by_its_name() -> None:
    words = bottleneck(0.9, 0.85, 0.95, "judges.slow")
    assert words.startswith("The reward is the bottleneck: samples spent 95% of their time in judges.slow")
    assert "Generation is the bottleneck" in bottleneck(0.9, 0.2, 0.3, "judges.slow")
    assert "Training is the bottleneck" in bottleneck(0.1, 0.5, 0.95, "judges.slow")


def test_a_terminal_shows_a_table_with_the_bottleneck_below() -> None:
    output = io.StringIO()
    with ProgressView(Console(file=output, force_terminal=True, width=120)) as view:
        view.step(record(trainer_idle_share=0.6, generator_idle_share=0.0))
        view.note("Committed.")
    shown = output.getvalue()
    assert "7 of 20" in shown
    assert "Generation is the bottleneck" in shown
    assert "Committed." in shown
