"""Every benchmark ends with one JSON line of the agreed form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import group_encoding, history, logprob_memory, packing, planner, queue_ops, sample_path, sc_dtype
from benchmarks.report import build_report
from tests.support.standin_engine import StandinEngine


class Value(msgspec.Struct, forbid_unknown_fields=True):
    median: float
    min: float
    max: float


class Report(msgspec.Struct, forbid_unknown_fields=True):
    benchmark: str
    machine: dict[str, Any]
    versions: dict[str, str]
    command: str
    repeats: int
    values: dict[str, Value]


def last_line(output: str) -> Report:
    return msgspec.json.decode(output.splitlines()[-1], type=Report)


def check(report: Report, name: str, words: str) -> None:
    assert report.benchmark == name
    assert report.command == f"python -m benchmarks.{name} {words}"
    assert report.repeats >= 5
    assert report.machine.keys() >= {"processor", "num_cores", "memory_gib", "kernel", "load_1min"}
    assert "python" in report.versions
    assert all(0 < value.min <= value.median <= value.max for value in report.values.values())


@pytest.mark.multiproc
def test_the_queue_benchmark_compares_both_modes_with_straw_and_with_synced_appends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert queue_ops.main(["--quick", "--repeats", "5", "--folder", str(tmp_path)]) == 0
    report = last_line(capsys.readouterr().out)
    check(report, "queue_ops", f"--quick --repeats 5 --folder {tmp_path}")
    assert report.machine["file_system"] != "unknown"
    sides = {"raw", *(f"{kind}_{mode}" for kind in ("straw_rpc", "vime") for mode in ("gc_off", "gc_on"))}
    ratios = {f"ops_over_{base}{mode}" for base in ("raw", "straw_rpc") for mode in ("", "_gc_off", "_gc_on")}
    assert (
        report.values.keys()
        == {f"items_per_s_{side}" for side in sides} | {f"cpu_ms_per_item_{side}" for side in sides} | ratios
    )
    assert list(tmp_path.iterdir()) == []


def test_the_history_benchmark_compares_restart_memory_and_disk(tmp_path: Path) -> None:
    values = history.measure_all(tmp_path, {"short": 250, "long": 500}, 1, reclaim=True)
    assert values.keys() == {
        *(f"{value}_{name}_gc" for value in ("restart_s", "memory_mib", "disk_mib") for name in ("short", "long")),
        *("restart_ratio_gc", "memory_ratio_gc", "disk_ratio"),
    }
    assert all(number > 0 for numbers in values.values() for number in numbers)


def test_the_planner_benchmark_reports_time_and_size_for_each_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.main(["--quick", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = last_line(line)
    check(report, "planner", "--quick --json")
    assert {name.rpartition("_")[2] for name in report.values} == {"32x8", "64x16"}
    size = report.values["plan_bytes_per_sample_32x8"]
    assert size.min == size.max  # the plan is a function of the groups


def test_float16_candidates_cost_score_centering_less_than_the_samplers_own_rounding(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sc_dtype.main(["--quick", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = last_line(line)
    check(report, "sc_dtype", "--quick --json")
    values = report.values
    for weight in ("none", "tis", "icepop"):
        assert values[f"gradient_error_float32_{weight}"].max < values[f"gradient_error_float16_{weight}"].min
    assert values["gradient_error_float16_none"].max < 0.2 * values["kernel_gradient_error_none"].min
    assert values["gradient_error_float16_none"].max < 1e-3
    assert values["head_mass_error_max_float16"].max < 5e-4


def test_a_sample_with_routes_and_candidates_takes_the_bytes_that_the_layout_promises(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bytes a token do not depend on the length, so the short group tells of the long one."""
    assert group_encoding.main(["--quick", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = last_line(line)
    check(report, "group_encoding", "--quick --json")
    scale = group_encoding.TOKENS / group_encoding.QUICK_TOKENS
    assert report.values["bytes_per_sample_mib_float16"].max * scale <= 9.2


def test_the_packing_benchmark_reports_full_and_even_microbatches(capsys: pytest.CaptureFixture[str]) -> None:
    assert packing.main(["--quick", "--json"]) == 0
    report = last_line(capsys.readouterr().out)
    check(report, "packing", "--quick --json")
    assert report.values["fill"].median >= 0.98
    assert report.values["imbalance"].median <= 1.02
    assert report.values["work_imbalance"].median <= 1.02
    assert report.values.keys() >= {f"first_fit_{name}" for name in ("fill", "imbalance", "seconds")}


def test_the_head_benchmark_reports_a_small_part_of_the_dense_heads_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert logprob_memory.main(["--quick", "--json"]) == 0
    report = last_line(capsys.readouterr().out)
    check(report, "logprob_memory", "--quick --json")
    assert report.values["memory_over_dense"].median < 0.5
    assert report.values.keys() >= {"time_over_dense_logprob", "memory_with_entropy_over_dense", "dense_peak_mib"}


SAMPLE_RATIOS = {
    "logprob_ratio", "head_ratio", "stock_logprob_ratio", "stock_head_ratio", "head_over_stock", "routes_ratio"
}  # fmt: skip
SAMPLE_RATES = {
    f"tokens_per_s_{side}" for side in ("none", "logprob", "head", "stock_logprob", "stock_head", "moe", "routes")
}


async def test_the_sample_benchmark_reports_a_rate_and_a_ratio_for_each_side() -> None:
    with StandinEngine(vocab_size=512) as engine:
        heads = await sample_path.measure_heads(engine.address, num_tokens=4, repeats=2)
        routes = await sample_path.measure_routes(engine.address, engine.address, num_tokens=4, repeats=2)
    assert heads.keys() | routes.keys() == SAMPLE_RATIOS | SAMPLE_RATES
    for name in SAMPLE_RATIOS - {"head_over_stock", "routes_ratio"}:
        side = name.removesuffix("_ratio")
        pairs = zip(heads[f"tokens_per_s_{side}"], heads["tokens_per_s_none"], strict=True)
        assert heads[name] == [rate / plain for rate, plain in pairs]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sample_benchmark_compares_columns_with_tokens_alone_and_with_vllms_own_route(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sample_path.main(["--quick", "--json"]) == 0
    report = last_line(capsys.readouterr().out)
    check(report, "sample_path", "--quick --json")
    assert report.values.keys() == SAMPLE_RATIOS | SAMPLE_RATES
    assert report.values["head_over_stock"].median > 2
    assert report.values["head_ratio"].median > report.values["stock_head_ratio"].median


VALUES: dict[Any, tuple[str, ...]] = {
    sample_path: ("logprob_ratio", "head_ratio", "head_over_stock", "routes_ratio", "tokens_per_s_none"),
    queue_ops: ("raw", "straw_rpc", "ops_over_raw_M"),
    history: ("restart_ratio", "memory_ratio", "disk_ratio"),
    sc_dtype: ("gradient_error_T_WEIGHT", "head_mass_error"),
    group_encoding: ("check_ms", "bytes_per_sample_mib_T"),
    planner: ("plan_ms", "plan_bytes_per_sample"),
    packing: ("fill", "imbalance", "seconds", "first_fit_fill"),
    logprob_memory: ("memory_over_dense", "time_over_dense_logprob"),
}


@pytest.mark.parametrize("module", VALUES)
def test_help_says_every_value_that_is_measured(module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        module.main(["--help"])
    words = capsys.readouterr().out
    assert "Measures" in words
    assert all(value in words for value in VALUES[module])


def test_too_few_repeats_are_refused_with_the_number_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        planner.main(["--repeats", "4"])
    assert "--repeats is 4, allowed: 5 or more" in capsys.readouterr().err


def test_a_report_holds_median_least_and_greatest_of_equally_many_numbers() -> None:
    report = build_report("x", {"a_ms": [3.0, 1.0, 2.0]}, argv=[], packages=["numpy"])
    assert report["values"] == {"a_ms": {"median": 2.0, "min": 1.0, "max": 3.0}}
    assert json.loads(json.dumps(report)) == report
    with pytest.raises(ValueError, match="one number for each repeat"):
        build_report("x", {"a": [1.0], "b": [1.0, 2.0]}, argv=[], packages=[])
