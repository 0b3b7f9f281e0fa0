"""What `vime parity` prints and how it ends; the comparison itself is made up here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline import parity_run
from pipeline.parity_verdict import EngineParity
from vime.algorithms.parity import MEANINGS, Fault, Finding, Gap, ParityReport
from vime.cli import parity
from vime.cli.main import main


def compared(mean: float, fault: Fault | None = None) -> EngineParity:
    findings = [
        Finding(each.value, None if each is Fault.PREFIX_CACHE else Gap(0.5, 0.6, 0.7), each is fault, MEANINGS[each])
        for each in Fault
    ]
    name = None if fault is None else fault.value
    return EngineParity("Engine 0", ParityReport(96, Gap(mean, 2 * mean, 3 * mean), name, findings))


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(parity, "validate", lambda *_, **__: [])
    monkeypatch.setattr(parity, "check_versions", lambda: None)

    def set_found(*found: EngineParity) -> None:
        monkeypatch.setattr(parity_run, "measure_parity", lambda *_: list(found))

    return set_found


def test_numbers_of_trainer_and_each_fault_are_a_table(finds: Any, capsys: pytest.CaptureFixture[str]) -> None:
    finds(compared(0.01))
    assert main(["parity"]) == 0
    first, header, trainer, *faults = capsys.readouterr().out.splitlines()
    assert first == "Engine 0 against the trainer on 96 tokens: mean 0.01, p99 0.02, max 0.03."
    assert header.split() == ["compared", "with", "mean", "p99", "max"]
    assert trainer.split() == ["the", "trainer", "0.01", "0.02", "0.03"]
    assert [line.split()[0] for line in faults] == [fault.value for fault in Fault]
    assert faults[-1].endswith("would not show on these tokens")


def test_a_difference_above_the_threshold_ends_with_2_and_what_to_do(
    finds: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    finds(compared(0.3, Fault.RAW_LOG_PROBS))
    assert main(["parity", "--parity-threshold", "0.2"]) == 2
    printed = capsys.readouterr()
    assert "explains the difference" in printed.out
    assert "Allowed: a mean of 0.2 (--parity-threshold)" in printed.err
    assert "--logprobs-mode processed_logprobs" in printed.err


def test_json_has_every_number_also_when_the_command_fails(finds: Any, capsys: pytest.CaptureFixture[str]) -> None:
    finds(compared(0.3))
    assert main(["parity", "--json"]) == 2
    (found,) = json.loads(capsys.readouterr().out)
    assert found["engine"] == "Engine 0"
    assert found["report"]["gap"] == {"mean": 0.3, "p99": 0.6, "max": pytest.approx(0.9)}
    assert {finding["fault"] for finding in found["report"]["findings"]} == {fault.value for fault in Fault}


@pytest.mark.parametrize(
    ("words", "said"),
    [("--dry-run", "--dry-run"), ("--parity-probes 0", "--parity-probes is 0"), ("--rollout-num-gpus 0", "no engine")],
)
def test_what_means_nothing_here_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", *words.split()]) == 1
    assert said in capsys.readouterr().err


def test_help_explains_each_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {fault.value}  " in shown for fault in Fault)
