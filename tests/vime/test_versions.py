"""The version sets, their check, and their agreement with the files that install them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from vime.errors import VersionMismatchError
from vime.versions import CPU, GPU, VersionSet, check_versions, installed_version, version_at_least

ROOT = Path(__file__).resolve().parents[2]


def fake(versions: VersionSet, **changes: str | None) -> Callable[[str], str | None]:
    """Metadata of an environment that holds `versions`, except for `changes` (None: not installed)."""
    found: dict[str, str | None] = {**versions.packages, **{k.replace("_", "-"): v for k, v in changes.items()}}
    return lambda package: found.get(package)


def pins(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_each_set_passes_its_own_check() -> None:
    assert check_versions(fake(CPU), (3, 11)) is CPU
    assert check_versions(fake(GPU), (3, 12)) is GPU


def test_a_local_part_that_the_set_does_not_state_is_ignored() -> None:
    assert check_versions(fake(CPU, torch="2.13.0+cpu"), (3, 11)) is CPU
    assert check_versions(fake(GPU, torch="2.11.0+cu130"), (3, 12)) is GPU


@pytest.mark.parametrize("package", [*CPU.packages])
def test_every_package_of_the_set_is_checked(package: str) -> None:
    found = "0.0.1+cpu" if package == "vllm" else "0.0.1"
    with pytest.raises(
        VersionMismatchError, match=re.escape(f"{package} is {found}, allowed: {CPU.packages[package]}")
    ):
        check_versions(fake(CPU, **{package.replace("-", "_"): found}), (3, 11))


def test_the_message_names_all_mismatches_and_the_next_step() -> None:
    with pytest.raises(VersionMismatchError) as caught:
        check_versions(fake(GPU, torch="2.10.0+cu128", ray=None), (3, 11))
    assert str(caught.value) == (
        "The installed packages don't belong together (gpu set): Python is 3.11, allowed: 3.12; "
        "torch is 2.10.0+cu128, allowed: 2.11.0; ray is not installed, allowed: 2.60.0. "
        "Make a new environment with Python 3.12 and install `vime[gpu]` in it."
    )


def test_a_cpu_wheel_without_its_vllm_metadata_is_told_from_a_gpu_environment() -> None:
    with pytest.raises(VersionMismatchError, match=r"cpu set.*vllm is not installed, allowed: 0\.32\.0\+cpu"):
        check_versions(fake(CPU, vllm=None), (3, 11))


def test_an_environment_without_vllm_names_both_ways_to_get_one() -> None:
    with pytest.raises(VersionMismatchError, match="vllm is not installed") as caught:
        check_versions(lambda _: None)
    assert CPU.remedy in caught.value.next_step
    assert GPU.remedy in caught.value.next_step


def test_an_unknown_package_has_no_version() -> None:
    assert installed_version("vime-no-such-package") is None


def test_the_requirement_files_install_the_cpu_set() -> None:
    pinned = {name: version for path in (ROOT / "requirements").glob("*.txt") for name, version in pins(path).items()}
    wanted = {name: version for name, version in CPU.packages.items() if name != "vllm"}  # scripts/setup_cpu.py
    assert {name: pinned.get(name) for name in wanted} == wanted


def test_no_package_is_pinned_twice() -> None:
    names = [name for path in (ROOT / "requirements").glob("*.txt") for name in pins(path)]
    normal = [re.sub(r"[-_.]+", "-", name).lower() for name in names]
    assert sorted(normal) == sorted(set(normal))


def test_the_gpu_extra_asks_for_the_gpu_set() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    pinned = dict(line.partition(";")[0].split("==") for line in extra["gpu"] if "==" in line)
    wanted = {name: version for name, version in GPU.packages.items() if name != "torch"}  # vLLM pins its torch
    assert {name: pinned.get(name) for name in wanted} == wanted


def test_the_check_imports_none_of_the_packages() -> None:
    code = (
        "import sys, vime.versions as v\n"
        "for package in v.CPU.packages: v.installed_version(package)\n"
        "print([m for m in ('vllm', 'torch', 'megatron', 'ray', 'straw', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_versions_compare_by_their_first_two_numbers() -> None:
    assert version_at_least("0.32.0+cpu", (0, 32))
    assert version_at_least("1.0", (0, 32))
    assert not version_at_least("0.26.0", (0, 32))
    assert not version_at_least("dev", (0, 26))
