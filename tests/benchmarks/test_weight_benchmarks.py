"""Benchmarks of publications, in their quick form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import delta, publish
from tests.benchmarks import publish_rehearsal


def test_the_delta_benchmark_reports_small_exact_deltas(capsys: pytest.CaptureFixture[str]) -> None:
    assert delta.main(["--quick", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["values"]
    assert values["bytes_over_full"]["max"] <= 0.1
    assert values["bit_equal"]["min"] == values["refused_and_repaired"]["min"] == 1.0
    assert 0 < values["density"]["median"] < 0.1


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(300)
def test_the_publish_benchmark_reports_exact_tokens_at_a_small_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert publish.main(["--quick", "--json", "--model", "moe"]) == 0
    values = json.loads(capsys.readouterr().out.splitlines()[-1])["values"]
    assert values["moe_requests_finished"]["min"] == values["moe_spans_exact"]["min"] == 1.0
    assert values["moe_error_own_kv"]["max"] <= 1e-4
    assert values["moe_error_fresh_engine"]["max"] <= 1e-4


def test_a_replayed_request_tells_where_its_spans_are_wrong(tmp_path: Path) -> None:
    """The yardstick itself: right spans fit, a span that begins one token late doesn't."""
    answered = publish_rehearsal.answer(tmp_path, boundary=5)
    assert answered.errors(5) < 1e-5
    assert answered.errors(6) > 1e-3
    assert answered.errors(4) > 1e-3


def test_the_help_of_the_delta_benchmark_says_every_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        delta.main(["--help"])
    words = capsys.readouterr().out
    assert all(f"  {name} " in words for name in ("bytes_over_full", "density", "bit_equal", "pull_over_full"))
