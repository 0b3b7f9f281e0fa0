"""A scrape is what the official client reads, and Prometheus finds every process by itself."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from pipeline.messages import QueueCounts
from pipeline.metric_sinks.sinks import MetricSinks
from pipeline.prometheus.exporter import (
    clear_targets,
    on_loop,
    start_exporter,
    write_engine_targets,
    write_router_target,
)
from pipeline.run_folder import RunFolder
from tests.pipeline.metric_sinks.records_for_sinks import evaluation_record, step_record
from vime.settings.parse import parse_settings

Sample = tuple[str, frozenset[tuple[str, str]]]


def scraped(folder: RunFolder, process: str) -> dict[Sample, float]:
    """(name, labels) -> value, found the way Prometheus finds it."""
    ((target,),) = [entry["targets"] for entry in json.loads(folder.prometheus_target(process).read_text())]
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labelled(name: str, value: str) -> Sample:
    return name, frozenset({("name", value)})


def plain(name: str) -> Sample:
    return name, frozenset()


def test_a_scrape_of_the_run_has_the_newest_records(tmp_path: Path) -> None:
    folder, sinks = RunFolder(tmp_path, tmp_path / "pool"), MetricSinks([], 1, print)
    exporter, problem = start_exporter(parse_settings(["--prometheus-port", "0"]).logging, folder, "run", sinks.newest)
    assert (exporter is not None, problem) == (True, "")
    assert exporter is not None
    with closing(exporter):
        assert scraped(folder, "run") == {}
        sinks.batch(step_record(0, reward_mean=0.25), is_told=False)
        sinks.batch(step_record(1, reward_mean=0.5), is_told=False)
        sinks.evaluation(evaluation_record(2))
        found = scraped(folder, "run")
    assert found[plain("vime_run_reward_mean")] == 0.5
    assert found[labelled("vime_run_train", "grad_norm")] == 1.5
    assert found[labelled("vime_run_dropped_total", "reward")] == 2
    assert found[labelled("vime_evaluation_metrics", "eval/math")] == 0.25
    assert not folder.prometheus_target("run").exists()


async def test_a_record_is_read_on_the_loop_that_changes_it(tmp_path: Path) -> None:
    folder, threads = RunFolder(tmp_path, tmp_path / "pool"), []

    def counts() -> QueueCounts:
        threads.append(asyncio.get_running_loop())
        return QueueCounts(5, 2, 1, 1, {"reward": 1}, 0, True)

    settings = parse_settings(["--prometheus-port", "0"]).logging
    exporter, _ = start_exporter(settings, folder, "coordinator", on_loop(counts, "coordinator"))
    assert exporter is not None
    with closing(exporter):
        found = await asyncio.to_thread(scraped, folder, "coordinator")
    assert threads == [asyncio.get_running_loop()]
    assert found[plain("vime_coordinator_generated_total")] == 5
    assert found[plain("vime_coordinator_backpressured")] == 1


def nothing() -> Mapping[str, msgspec.Struct]:
    return {}


def test_without_the_flag_nothing_listens(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, tmp_path / "pool")
    settings = parse_settings([]).logging
    assert start_exporter(settings, folder, "run", nothing) == (None, "")
    write_engine_targets(settings, folder, {"engine_0": "http://127.0.0.1:8000"})
    write_router_target(settings, folder, "default", ("127.0.0.1", 29000))
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_told_and_stops_nothing(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = parse_settings(["--prometheus-port", str(port)]).logging
        exporter, problem = start_exporter(settings, RunFolder(tmp_path, tmp_path / "pool"), "run", nothing)
    assert exporter is None
    assert problem.startswith(f"--prometheus-port {port}: run has no /metrics: ")


def test_a_full_disk_costs_the_file_by_which_a_process_is_found_and_not_the_process(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, tmp_path / "pool")
    folder.prometheus.write_text("a file in the way")
    exporter, problem = start_exporter(parse_settings(["--prometheus-port", "0"]).logging, folder, "run", nothing)
    assert problem == ""
    assert exporter is not None
    folder.prometheus.unlink()
    exporter.close()


def test_engines_and_routers_are_found_at_their_own_addresses(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, tmp_path / "pool")
    settings = parse_settings(["--prometheus-port", "0"]).logging
    write_engine_targets(settings, folder, {"engine_1": "http://10.0.0.2:8000"})
    ((entry,),) = [json.loads(folder.prometheus_target("engine_1").read_text())]
    assert entry["targets"] == ["10.0.0.2:8000"]
    assert (entry["labels"]["role"], entry["labels"]["process"]) == ("engine", "engine_1")
    write_router_target(settings, folder, "default", ("127.0.0.1", 29000))
    ((router,),) = [json.loads(folder.prometheus_target("router_default").read_text())]
    assert router["targets"] == ["127.0.0.1:29000"]
    assert router["labels"]["role"] == "router"
    clear_targets(folder)
    assert list(folder.prometheus.iterdir()) == []
