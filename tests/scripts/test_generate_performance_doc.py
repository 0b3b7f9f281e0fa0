"""docs/performance.md quotes the stored results of the benchmarks, and says which floors are missed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return load_script("generate_performance_doc")


def shard_report(bytes_over_shard: float, peak_over_shard: float) -> dict[str, Any]:
    values = {"bytes_over_shard": bytes_over_shard, "peak_over_shard": peak_over_shard}
    return {
        "benchmark": "shard_read",
        "machine": {"processor": "P", "num_cores": 2, "memory_gib": 8, "file_system": "ext4", "load_1min": 0.5},
        "command": "python -m benchmarks.shard_read",
        "repeats": 5,
        "values": {name: {"median": value, "min": value - 0.5, "max": value + 1} for name, value in values.items()},
    }


def test_the_page_is_up_to_date(generator: ModuleType) -> None:
    page = generator.render(generator.read_results())
    assert generator.TARGET.read_text() == page, "run `python scripts/generate_performance_doc.py`"


def test_every_stored_result_is_in_the_form_that_benchmarks_print_and_names_no_folder(generator: ModuleType) -> None:
    reports = [report for reports in generator.read_results().values() for report in reports]
    needs_no_gpu = {name for name in generator.FLOORS if not name.startswith("gpu.")}
    assert {report["benchmark"] for report in reports} >= needs_no_gpu
    assert all("/" not in report["command"] for report in reports)


def test_a_value_is_quoted_with_its_range_its_machine_and_its_command(generator: ModuleType) -> None:
    page = generator.render({"cpu": [shard_report(1.12, 1.5)]})
    assert "| `bytes_over_shard` | <= 1.25 | 1.12 | 0.62 to 2.12 |" in page
    assert "on 2 cores (P), 8 GiB, ext4, load 0.5" in page
    assert "`python -m benchmarks.shard_read`, 5 repeats" in page


def test_a_part_says_in_words_what_bounds_it(generator: ModuleType) -> None:
    report = shard_report(1.12, 1.5) | {"benchmark": "gpu.queue_load"}
    medians = {"straw_step_s": 4.0, "memory_step_s": 4.0, "straw_wait_s": 1.0, "memory_wait_s": 2.0}
    medians["straw_over_memory"] = 1.0
    report["values"] = {name: {"median": value, "min": value, "max": value} for name, value in medians.items()}
    words = "25% of a step with the queue on disk\nand 50% with samples in memory"
    assert words in generator.render({"gpu_shared": [report]})
    assert words not in generator.render({"gpu": [report]}), "they are of one GPU"


def test_a_part_for_gpus_that_measured_some_of_its_values_has_their_rows_alone(generator: ModuleType) -> None:
    report = shard_report(1.12, 1.5) | {"benchmark": "gpu.stream"}
    report["values"] = {"long_prompts_turns_ceiling": {"median": 1.5, "min": 1.5, "max": 1.5}}
    page = generator.render({"gpu": [report]})
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [row.split("|")[1].strip() for row in rows] == ["`long_prompts_turns_ceiling`"]
    (unmeasured,) = (line for line in page.splitlines() if line.startswith("Wanted, but not measured in this run:"))
    assert "`stream_over_peer`" in unmeasured
    assert "turns_ceiling" not in unmeasured, "nothing is wanted of it"


def test_a_missed_floor_is_said(generator: ModuleType) -> None:
    page = generator.render({"cpu": [shard_report(1.26, 2.0)]})
    assert "| `bytes_over_shard` | <= 1.25 | **1.26** (missed) |" in page
    assert "| `peak_over_shard` | <= 2 | 2 |" in page
