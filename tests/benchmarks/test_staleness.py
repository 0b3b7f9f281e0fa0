"""The experiment with old samples: their age is what it says, and its values come from the runs' own records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.staleness import AGE, Curve, draw, main, smoothed, summarize


def test_values_are_means_over_the_steps_that_they_name() -> None:
    steps = 20
    old = [float(min(step, AGE)) for step in range(steps)]
    rising = Curve([step / 20 for step in range(steps)], old, [0.1] * steps)
    flat = Curve([0.25] * steps, old, [0.0] * steps)
    values = summarize({"clip": [rising], "none": [flat]})
    assert values["reward_last_clip"] == [pytest.approx((0.9 + 0.95) / 2)]
    assert values["staleness_clip"] == values["staleness_none"] == [AGE]
    assert values["reward_first"] == [pytest.approx((0.1 + 0.25) / 2)]
    assert values["outside_clip_clip"] == [pytest.approx(0.1)]


def test_a_smoothed_number_is_the_mean_of_it_and_those_before_it() -> None:
    assert smoothed([1.0, 2.0, 3.0, 4.0], width=2) == [1.0, 1.5, 2.5, 3.5]


def test_curves_are_drawn_as_a_picture(tmp_path: Path) -> None:
    draw({"clip": [[0.1, 0.2]], "none": [[0.1, 0.0]]}, tmp_path / "images" / "curves.png")
    assert (tmp_path / "images" / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_samples_of_the_experiment_are_four_versions_old(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick"]) == 0
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    for correction in ("clip", "tis", "none"):
        assert report["values"][f"staleness_{correction}"]["median"] == AGE
