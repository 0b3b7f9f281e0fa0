"""Checks of the machine, on facts made up: a sound one passes, each fault fails with its own next step."""

from dataclasses import replace
from typing import Any

import pytest

from pipeline.doctor.check import Check, Outcome
from pipeline.doctor.machine import MachineFacts, gather, machine_checks, port_error
from vime.versions import CPU, GPU

SOUND = MachineFacts(
    python=CPU.python,
    versions=dict(CPU.packages),
    num_gpus=0,
    num_slots=8,
    shared_bytes=4 * 2**30,
    open_files=65536,
    year=2026,
    monotonic_step_s=0.0,
    port_error=None,
)


def check(name: str, requests: int = 64, **changes: Any) -> Check:
    (found,) = [check for check in machine_checks(replace(SOUND, **changes), requests) if check.name == name]
    return found


def test_sound_machine_passes_everything() -> None:
    checks = machine_checks(SOUND, 64)
    assert {check.outcome for check in checks} == {Outcome.PASS}
    assert len({check.name for check in checks}) == len(checks) == 8
    assert not any(check.next_step for check in checks)


@pytest.mark.parametrize(
    ("name", "changes", "outcome", "found", "next_step"),
    [
        ("packages", {"versions": {**CPU.packages, "torch": "2.0.0"}}, "fail", "torch is 2.0.0", "make clean setup"),
        ("packages", {"python": (3, 9)}, "fail", "Python is 3.9", "make clean setup"),
        ("engine", {"versions": {}}, "fail", "not installed", "Install"),
        ("engine", {"versions": GPU.packages}, "warn", "vLLM 0.26.0 has no adapter", "use vLLM 0.32"),
        ("megatron", {"versions": {}}, "fail", "not installed", "Install"),
        ("megatron", {"versions": {"megatron-core": "0.20.0"}}, "warn", "0.20.0", "list_megatron_flags"),
        ("ports", {"port_error": "Permission denied"}, "fail", "Permission denied", "loopback"),
        ("shared memory", {"shared_bytes": None}, "fail", "missing", "--shm-size"),
        ("shared memory", {"shared_bytes": 64 * 2**20}, "fail", "64 MiB", "--shm-size"),
        ("shared memory", {"shared_bytes": 512 * 2**20}, "warn", "512 MiB", "--shm-size"),
        ("clock", {"year": 1970}, "fail", "1970", "Set the clock"),
        ("clock", {"monotonic_step_s": -2.0}, "fail", "went back by 2 s", "another host"),
        ("open files", {"open_files": 256}, "fail", "limit of open files is 256", "ulimit -n 65536"),
    ],
)
def test_fault_is_found_with_its_next_step(
    name: str, changes: dict[str, Any], outcome: str, found: str, next_step: str
) -> None:
    result = check(name, **changes)
    assert result.outcome.value == outcome
    assert found in result.found
    assert next_step in result.next_step


def test_more_requests_need_more_files() -> None:
    assert check("open files", open_files=1024).outcome is Outcome.PASS
    assert check("open files", open_files=1024, requests=1024).outcome is Outcome.FAIL


def test_gpus_are_named_when_there_are_some() -> None:
    assert check("devices", num_gpus=4).found == "4 GPUs"


def test_port_in_use_is_found() -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        assert port_error("127.0.0.1", listener.getsockname()[1]) == "Address already in use"


def test_this_machine_can_be_looked_at() -> None:
    facts = gather()
    assert facts.num_slots > 0
    assert facts.versions["ray"]
