"""Benchmarks of publications, in their quick form."""

from __future__ import annotations

import json

import pytest

from benchmarks import delta


def test_the_delta_benchmark_reports_small_exact_deltas(capsys: pytest.CaptureFixture[str]) -> None:
    assert delta.main(["--quick", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["values"]
    assert values["bytes_over_full"]["max"] <= 0.1
    assert values["bit_equal"]["min"] == values["refused_and_repaired"]["min"] == 1.0
    assert 0 < values["density"]["median"] < 0.1


def test_the_help_of_the_delta_benchmark_says_every_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        delta.main(["--help"])
    words = capsys.readouterr().out
    assert all(f"  {name} " in words for name in ("bytes_over_full", "density", "bit_equal", "pull_over_full"))
