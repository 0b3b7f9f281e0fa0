"""A run tries the file system under its queue before it touches it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pipeline import session as session_module
from pipeline.cluster import Cluster
from pipeline.incidents import IncidentLog
from pipeline.metric_sinks.sinks import MetricSinks
from pipeline.node_clients import other_nodes
from pipeline.progress import ProgressView
from pipeline.run import run_training
from pipeline.run_folder import RunFolder
from pipeline.session_start import Start
from pipeline.storage_proof import prove_nodes
from recovery.restore import RestoreMode, RestorePlan
from storage.juicefs import declaration_of
from tests.pipeline.preview.planned import write_job
from tests.storage.test_juicefs import SAFE
from vime.errors import RestoreError, StorageError
from vime.settings.groups.queue import QueueSettings
from vime.settings.placement import Demand
from vime.settings.resolve import Resolved, resolve


def job(folder: Path) -> Resolved:
    """A job that declares JuiceFS as it should be."""
    declaration = folder / "declaration.json"
    declaration.write_text(json.dumps(declaration_of(SAFE, "text")))
    profile = ["--rollout-storage-profile", "juicefs", "--rollout-storage-declaration", str(declaration)]
    return resolve([*write_job(folder), *profile])


def test_run_whose_queue_is_not_on_the_declared_mount_ends_before_it_makes_a_pool(tmp_path: Path) -> None:
    with (
        ProgressView() as view,
        pytest.raises(StorageError, match=r"JuiceFS mount: .* lies on .*, not on fuse.juicefs"),
    ):
        run_training(job(tmp_path), view)
    assert not (tmp_path / "run" / "rollout_data" / "pool").exists()


@pytest.mark.parametrize(("flag", "value"), [("--ckpt-step", "40"), ("--load", "nope/rollout/committed_3.json")])
def test_start_from_what_is_not_there_leaves_no_folder(
    flag: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ProgressView() as view, pytest.raises(RestoreError, match=value.partition("/")[0]):
        run_training(resolve([*write_job(tmp_path), flag, value]), view)
    assert not (tmp_path / "run").exists()


async def test_nodes_are_tried_before_the_coordinator_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = job(tmp_path)
    folder = RunFolder.of(resolved.settings)
    tried: list[tuple[Path, QueueSettings]] = []

    async def refuse(queue: Path, settings: QueueSettings) -> None:
        tried.append((queue, settings))
        raise StorageError("node 7 lacks it")

    monkeypatch.setattr(session_module, "prove_nodes", refuse)
    monkeypatch.setattr(session_module, "Workers", lambda *_: None)
    nothing: Any = None
    start = Start(RestorePlan(RestoreMode.NEW, ".", 0), "b", None, None, None)
    with ProgressView() as view:
        session = session_module.Session(
            resolved.settings,
            folder,
            start,
            nothing,
            view,
            nothing,
            MetricSinks([], 1, print),
            IncidentLog(folder.incidents),
            evaluates_first=False,
        )
        with pytest.raises(StorageError, match="node 7 lacks it"):
            await session._start_all()
    assert tried == [(folder.queue, resolved.settings.queue)]


@pytest.mark.multiproc
def test_cluster_of_this_machine_alone_has_no_other_node_to_ask(tmp_path: Path) -> None:
    with Cluster(Demand((1,), (1,)), 1):
        assert other_nodes() == []
        asyncio.run(prove_nodes(tmp_path, QueueSettings(rollout_data_transport="straw")))
