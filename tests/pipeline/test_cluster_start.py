"""A cluster that doesn't come into being says so in words, and leaves nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from pipeline import cluster as cluster_module
from pipeline.cluster import Cluster
from vime.cli.exit_codes import ExitCode, exit_code
from vime.errors import ClusterStartError
from vime.settings.placement import Demand


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Ray's own files lie."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster_module, "temporary_folder", lambda prefix: _made(tmp_path / prefix))
    return tmp_path


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def _fails(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def init(**_: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "init", init)


def test_a_ray_that_is_not_up_in_time_is_the_machines_fault_and_leaves_no_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fails(monkeypatch, Exception("The current node timed out during startup.\nMore."))
    with pytest.raises(ClusterStartError) as caught, Cluster(Demand((1,), (1,)), 1):
        pass
    assert caught.value.message == "Ray did not start on this machine: The current node timed out during startup."
    assert "vime doctor" in caught.value.next_step
    assert exit_code(caught.value) is ExitCode.ENVIRONMENT
    assert list(folder.iterdir()) == []


def test_a_cluster_that_is_not_there_is_named_by_its_address(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    _fails(monkeypatch, ConnectionError())
    with pytest.raises(ClusterStartError) as caught, Cluster(Demand((1,), (1,)), 1):
        pass
    assert caught.value.message == "RAY_ADDRESS is 10.0.0.9:6379, which can't be joined: ConnectionError"
    assert "unset RAY_ADDRESS" in caught.value.next_step
    assert list(folder.iterdir()) == []


def test_a_start_that_is_interrupted_leaves_no_folder_either(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fails(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt), Cluster(Demand((1,), (1,)), 1):
        pass
    assert list(folder.iterdir()) == []
