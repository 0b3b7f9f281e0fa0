"""Payloads between real processes through Ray."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from pipeline.actors.coordinator import CoordinatorActor
from pipeline.actors.settings import encode_settings
from pipeline.coordinator_config import CoordinatorConfig
from pipeline.group_wiring import build_data_source
from pipeline.messages import QueueCounts, decode, encode
from pipeline.run_folder import RunFolder
from tests.pipeline.mini_stream import write_prompts
from tests.pipeline.test_queue_data_source import respond
from tests.pipeline.transports.ray_actors import Table, User, digest, spawn
from vime.errors import StorageError
from vime.settings.resolve import resolve

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

STORE_BYTES = 80 * 2**20
MIB = 2**20
PAYLOAD_BYTES = 10 * MIB
_NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the package nixl is missing")
)


@pytest.fixture(scope="module")
def spilled() -> Iterator[Callable[[], list[Path]]]:
    """A cluster with a small object store; tells which files it has spilled to disk."""
    folder = Path(f"/tmp/vime-rt-{os.getpid()}")  # sockets have short paths
    path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
        _temp_dir=str(folder),
    )
    yield lambda: [path for path in folder.rglob("ray_spilled_objects*/*") if path.is_file()]
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", params=["object-store", _NIXL])
def users(request: pytest.FixtureRequest, spilled: object) -> tuple[Any, Any, Any]:  # noqa: ARG001 - the cluster
    """(coordinator, producer, reader)."""
    table = spawn(Table)
    return table, spawn(User, table, request.param), spawn(User, table, request.param)


def test_a_payload_reaches_another_process_and_the_coordinator_holds_references_only(
    users: tuple[Any, Any, Any],
) -> None:
    table, producer, reader = users
    ray.get(producer.put.remote("a", 7, [10, 0, 2 * MIB]))
    assert ray.get(reader.digests.remote("a", [2, 0, 1])) == [digest(7, 2 * MIB), digest(7, 10), digest(7, 0)]
    assert ray.get(table.kinds.remote("a")) == {"ObjectRef"}


def test_bytes_of_the_coordinator_reach_the_others(users: tuple[Any, Any, Any]) -> None:
    table, _, reader = users
    ray.get(table.keep_bytes.remote("prompt", b"\x05" * 100))
    assert ray.get(reader.digests.remote("prompt", [0])) == [digest(5, 100)]


def test_what_was_released_is_refused_by_name(users: tuple[Any, Any, Any]) -> None:
    _, producer, reader = users
    ray.get(producer.put.remote("b", 7, [10, 5000]))
    ray.get(reader.release.remote(["b"]))
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ray.get(reader.digests.remote("b", [0]))
    assert isinstance(caught.value.cause, StorageError)
    assert "Publication b is not there" in caught.value.cause.message


@pytest.mark.parametrize("transport", ["object-store", "straw"])
def test_a_rollout_function_works_on_the_queue_of_a_run(
    transport: str,
    tmp_path: Path,
    spilled: object,  # noqa: ARG001 - the cluster
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 64}')
    words = [
        "--save", str(tmp_path / "run"), "--prompt-data", str(write_prompts(tmp_path)), "--hf-checkpoint",
        str(tmp_path), "--n-samples-per-prompt", "2", "--rollout-data-transport", transport,
    ]  # fmt: skip
    given = resolve(words).settings
    RunFolder.of(given).make()
    config = encode(CoordinatorConfig("main", [], groups_wanted=4, max_groups=4, lease_seconds=60))
    coordinator = spawn(CoordinatorActor, encode_settings(given), config)
    assert ray.get(coordinator.pid.remote()) > 0
    with build_data_source(given, coordinator, branch="main", worker_id="custom", policy_version=lambda: 0) as source:
        partial, dropped, *finished = source.get_samples(4)
        for group in (partial, *finished):
            for sample in group:
                respond(sample, finished=group is not partial)
        assert source.accept_samples(finished) == [0, 1]
        source.drop_samples([dropped], "zero_std")
        assert source.add_samples([partial]) == [True]
        (again,) = source.get_samples(1)
        assert [sample.tokens for sample in again] == [sample.tokens for sample in partial]
        source._keeper.beat()
        assert len(source._keeper.held()) == 1
    counts = decode(ray.get(coordinator.counts.remote()), QueueCounts)
    assert (counts.pending, counts.in_flight, counts.dropped) == (2, 1, {"zero_std": 1})
    ray.get(coordinator.close.remote())


def test_memory_is_given_back_and_nothing_is_evicted_unread(
    users: tuple[Any, Any, Any], spilled: Callable[[], list[Path]]
) -> None:
    """Twice what memory holds: released as it comes, none of it touches the disk; unread, all of it comes back."""
    _, producer, reader = users
    keys = [f"c{number}" for number in range(2 * STORE_BYTES // PAYLOAD_BYTES)]
    before = spilled()
    for number, key in enumerate(keys):
        ray.get(producer.put.remote(key, number, [PAYLOAD_BYTES]))
        ray.get(producer.release.remote([key]))
    assert spilled() == before
    for number, key in enumerate(keys):
        ray.get(producer.put.remote(key, number, [PAYLOAD_BYTES]))
    for number, key in enumerate(keys):
        assert ray.get(reader.digests.remote(key, [0])) == [digest(number, PAYLOAD_BYTES)]
