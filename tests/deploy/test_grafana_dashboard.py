"""The dashboard asks for metrics that are exported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import yaml

from pipeline.prometheus.families import families, metric_name
from pipeline.prometheus.records import ROLES
from tests.pipeline.metric_sinks.records_for_sinks import step_record

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"


def exported() -> set[str]:
    """Names of all metrics that a run can export."""
    return {
        metric_name(role, field.name)
        for role, record in ROLES.items()
        for field in msgspec.structs.fields(record)
        if field.type in (int, float, bool, dict[str, int], dict[str, float])
    }


def test_every_query_names_an_exported_metric() -> None:
    dashboard = json.loads((GRAFANA / "vime.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in dashboard["templating"]["list"]]
    asked = {name for query in queries for name in re.findall(r"\bvime_\w+", query)}
    assert len(asked) > 20
    assert asked <= exported()


def test_the_names_are_those_of_a_scrape() -> None:
    found = {sample.name for family in families("run", step_record(0)) for sample in family.samples}
    assert found == {name for name in exported() if name.startswith("vime_run_")}


def test_the_scrape_configuration_finds_the_files_of_a_run() -> None:
    config = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())
    (pattern,) = config["scrape_configs"][0]["file_sd_configs"][0]["files"]
    assert Path("/path/to/runs/a/prometheus/run.json").match(pattern)
