"""docs/metrics.md says what a run writes."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from pipeline.progress import StepRecord
from pipeline.prometheus.families import metric_name
from pipeline.prometheus.records import ROLES
from tests.support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return load_script("generate_metrics_doc")


def test_the_page_is_up_to_date(generator: ModuleType) -> None:
    assert generator.TARGET.read_text() == generator.whole_page(), "run `python scripts/generate_metrics_doc.py`"


def test_the_exported_metrics_are_listed(generator: ModuleType) -> None:
    named = {
        metric_name(role, field.name)
        for role, record in ROLES.items()
        for field in msgspec.structs.fields(record)
        if field.type in (int, float, bool, dict[str, int], dict[str, float])
    }
    listed = {line.split("`")[1] for line in generator.whole_page().splitlines() if line.startswith("| `vime_")}
    assert listed == named


def test_every_field_of_the_record_is_listed_in_order(generator: ModuleType) -> None:
    names = [name for name, _, _ in generator.record_fields(generator.RECORD.read_text())]
    assert names == [field.name for field in msgspec.structs.fields(StepRecord)]


def test_a_docstring_wins_and_a_field_without_a_meaning_is_refused(generator: ModuleType) -> None:
    loss = 'METRIC_NAMES = ("loss",)\nOPTIONAL_METRIC_NAMES = ("tis",)'
    evaluation = "class EvaluationRecord: ...\nclass DataSetResult: ..."
    said = 'class StepRecord:\n    wait_s: float\n    """Said\n    here."""\n'
    samples = 'MEANINGS: dict[str, str] = {"rollout/loops": "Of the samples."}'
    page = generator.render(said, loss, loss, evaluation, samples)
    assert "| `wait_s` | `float` | s | Said here. |" in page
    assert "| `rollout/loops` | Of the samples. |" in page
    with pytest.raises(SystemExit, match=r"StepRecord\.novelty has no docstring"):
        generator.render("class StepRecord:\n    novelty: int\n", loss, loss, evaluation, samples)


def test_no_meaning_is_left_over_from_a_field_that_is_gone(generator: ModuleType) -> None:
    names = {name for name, _, _ in generator.record_fields(generator.RECORD.read_text())}
    assert generator.MEANINGS.keys() | generator.OTHER_UNITS.keys() <= names
    loss = generator.LOSS.read_text()
    metrics = [name for kind in ("", "OPTIONAL_") for name in generator.loss_metrics(loss, f"{kind}METRIC_NAMES")]
    metrics += generator.BESIDE_THE_LOSS
    assert sorted(generator.TRAIN_MEANINGS) == sorted(metrics)
    of_critic = generator.loss_metrics(generator.CRITIC.read_text(), "METRIC_NAMES")
    assert sorted(generator.CRITIC_MEANINGS) == sorted(of_critic)
