"""From a record of numbers to Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

PREFIX = "vime"
LABEL = "name"
"""Label of the metrics that a field with several named numbers becomes."""
COUNTERS = frozenset(
    {
        "dropped",
        "drifted_tokens",
        "failed_samples",
        "generated",
        "groups_aborted",
        "groups_published",
        "groups_stale",
        "samples_published",
        "spanning_samples",
        "tokens_generated",
        "trained",
    }
)
"""Fields that only rise while a process lives. Their metrics end in `_total`."""


def families(role: str, record: msgspec.Struct) -> Iterator[Metric]:
    """A metric `vime_ROLE_FIELD` for each field that holds a number, or numbers by name; other fields have none."""
    for field in record.__struct_fields__:
        value = getattr(record, field)
        named = {"": value} if isinstance(value, int | float) else value
        if isinstance(named, dict) and all(isinstance(number, int | float) for number in named.values()):
            yield _family(role, field, {str(name): float(number) for name, number in named.items()}, value is not named)


def metric_name(role: str, field: str) -> str:
    """The name in a scrape."""
    return f"{PREFIX}_{role}_{field}{'_total' if field in COUNTERS else ''}"


def _family(role: str, field: str, values: dict[str, float], is_single: bool) -> Metric:
    make = CounterMetricFamily if field in COUNTERS else GaugeMetricFamily
    labels = () if is_single else (LABEL,)
    family = make(f"{PREFIX}_{role}_{field}", f"{field} of the {role}: docs/metrics.md", labels=labels)
    for name, value in values.items():
        family.add_metric([] if is_single else [name], value)
    return family
