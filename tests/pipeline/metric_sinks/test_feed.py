"""A sink that fails or hangs costs the run nothing but a sentence."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pipeline.metric_sinks.feed import SinkFeed

COPIES = "import sys; open(sys.argv[1], 'wb').write(sys.stdin.buffer.read())"
FAILS = "import sys; sys.stdin.readline(); print('NoRouteError: nobody is there', end='')"
HANGS = "import time; time.sleep(600)"
LINE = b"x" * 1000


def feed(tmp_path: Path, program: str, capacity: int = 256) -> SinkFeed:
    command = [sys.executable, "-S", "-c", program, str(tmp_path / "copy")]
    return SinkFeed("a sink", command, b"first", tmp_path / "sink.log", capacity=capacity)


def offer_until_told(sink: SinkFeed) -> str:
    """Offer lines until the sink has a problem; a generous deadline."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        sink.offer(LINE)
        if problem := sink.problem():
            return problem
        time.sleep(0.001)
    raise TimeoutError("the sink has no problem")


def test_all_lines_arrive_in_order(tmp_path: Path) -> None:
    sink = feed(tmp_path, COPIES)
    sink.offer(b"second")
    assert sink.close(timeout_s=60) == ""
    assert (tmp_path / "copy").read_bytes() == b"first\nsecond\n"


def test_why_a_sink_failed_is_told_once_and_what_it_missed_is_counted(tmp_path: Path) -> None:
    sink = feed(tmp_path, FAILS)
    assert offer_until_told(sink).startswith("a sink: NoRouteError: nobody is there. Training goes on;")
    assert sink.problem() == ""
    missed = sink.dropped
    sink.offer(LINE)
    assert sink.dropped == missed + 1
    assert "NoRouteError" not in (words := sink.close(timeout_s=60))
    assert "was not given" in words


def test_a_sink_that_hangs_delays_nothing_and_is_killed_at_the_end(tmp_path: Path) -> None:
    sink = feed(tmp_path, HANGS, capacity=4)
    slowest_s = 0.0
    for _ in range(500):
        before = time.thread_time()
        sink.offer(LINE)
        slowest_s = max(slowest_s, time.thread_time() - before)
    assert slowest_s < 0.1
    assert "doesn't keep up" in offer_until_told(sink)
    assert sink.dropped > 300
    began = time.monotonic()
    words = sink.close(timeout_s=0.2)
    assert "was killed" in words
    assert time.monotonic() - began < 30


def test_a_program_that_cannot_be_started_is_a_failed_sink(tmp_path: Path) -> None:
    sink = SinkFeed("a sink", [str(tmp_path / "missing")], b"first", tmp_path / "sink.log")
    assert "No such file" in offer_until_told(sink)
