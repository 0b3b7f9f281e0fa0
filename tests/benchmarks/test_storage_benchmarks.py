"""The benchmarks of the pool report all that they promise, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import shard_read, storage_write
from tests.benchmarks.test_benchmarks import check, last_line


def test_the_write_benchmark_reports_every_form_and_the_ratios_between_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert storage_write.main(["--quick", "--json", "--repeats", "5", "--folder", str(tmp_path)]) == 0
    report = last_line(capsys.readouterr().out)
    check(report, "storage_write", f"--quick --json --repeats 5 --folder {tmp_path}")
    assert report.values.keys() >= {
        *(f"{form}_mib_per_s" for form in ("ours", "straw_record", "reference", "raw")),
        *("bytes_per_sample_mib", "write_over_straw_record", "write_over_raw", "sample_rate_over_reference"),
        *("small_groups_per_s_batched", "small_groups_per_s_one_by_one", "small_write_over_one_by_one"),
    }
    size = report.values["bytes_per_sample_mib"]
    assert size.min == size.max
    assert list(tmp_path.iterdir()) == []


@pytest.mark.multiproc
def test_the_read_benchmark_shows_that_a_rank_reads_and_holds_little_more_than_its_shard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shard_read.main(["--quick", "--json", "--repeats", "5", "--folder", str(tmp_path)]) == 0
    report = last_line(capsys.readouterr().out)
    check(report, "shard_read", f"--quick --json --repeats 5 --folder {tmp_path}")
    assert report.values["bytes_over_shard"].max <= 1.25
    assert report.values["peak_over_shard"].max <= 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "values"),
    [
        (storage_write, ["bytes_per_sample_mib", "write_over_straw_record", "small_write_over_one_by_one"]),
        (shard_read, ["bytes_over_shard", "peak_over_shard", "_context"]),
    ],
)
def test_help_explains_the_values(module: Any, values: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        module.main(["--help"])
    words = capsys.readouterr().out
    assert "Measures" in words
    assert [value for value in values if value not in words] == []
