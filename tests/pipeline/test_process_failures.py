"""What the user is told of a process that fails."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from pipeline.actors import coordinator as coordinator_actor
from pipeline.actors.coordinator import CoordinatorActor
from pipeline.actors.settings import encode_settings
from pipeline.cluster import answer
from pipeline.coordinator_config import CoordinatorConfig
from pipeline.messages import encode
from pipeline.node_devices import ProcessPlace
from pipeline.run_folder import RunFolder
from pipeline.workers import Workers
from storage.pool import Pool
from storage.queue import GroupQueue
from vime.errors import CoordinatorBusyError, EngineError, RunFailedError, StorageError
from vime.settings.groups import Settings
from vime.settings.resolve import resolve


def settings(folder: Path, *more: str) -> Settings:
    (folder / "prompts.jsonl").write_text('{"input": "p"}\n')
    words = ["--save", str(folder / "run"), "--prompt-data", str(folder / "prompts.jsonl")]
    return resolve([*words, "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", *more]).settings


async def test_a_queue_that_cannot_be_opened_is_told_by_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_actor, "log_to_file", lambda _: None)
    given = settings(tmp_path, "--rollout-data-transport", "straw")
    with (
        Pool.create(RunFolder.of(given).queue, "rollout") as pool,
        GroupQueue.open(pool, owner="the other run", lease_seconds=60),
    ):
        actor = CoordinatorActor(encode_settings(given), encode(CoordinatorConfig("b", [], 1, 1, 60)))
        for _ in range(2):
            with pytest.raises(CoordinatorBusyError, match="the other run"):
                await actor.pid()


async def test_a_dead_process_is_named_with_the_reason() -> None:
    async def dead() -> None:
        raise RayActorError(
            error_msg="The actor died.\nTraceback ...\nNameError: no thing. Some common causes are: ..."
        )

    with pytest.raises(RunFailedError, match=r"trainer rank 1 died\. NameError: no thing\. Run") as caught:
        await answer(dead(), "trainer rank 1")
    assert "Run the same command again" in caught.value.next_step


class NoCluster:
    """Starts nothing."""

    def spawn_worker(self, *_: Any, **__: Any) -> None:
        return None

    def engine_places(self, number: int) -> list[ProcessPlace]:
        return [ProcessPlace(f"node{number}", "127.0.0.1")]


async def test_the_end_of_a_process_is_told_rather_than_the_errors_that_it_causes(tmp_path: Path) -> None:
    given = settings(tmp_path)
    folder = RunFolder.of(given)
    folder.make()
    folder.log("engine_0").write_text("out of memory\n")
    workers = Workers(given, folder, NoCluster())  # type: ignore[arg-type]

    async def end_soon() -> int:
        await asyncio.sleep(0.1)
        return 137

    async def publish() -> None:
        raise EngineError("Engine: connection reset")

    workers.watch.add("engine_0", end_soon())
    with pytest.raises(RunFailedError, match=r"engine_0 ended unexpectedly \(exit status 137\)(.|\n)*out of memory"):
        await workers.guarded(publish())


async def test_an_error_of_the_work_itself_comes_out_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.process_watch.DEATH_S", 0.1)
    given = settings(tmp_path)
    workers = Workers(given, RunFolder.of(given), NoCluster())  # type: ignore[arg-type]

    async def publish() -> None:
        raise EngineError("Engine: refused")

    workers.watch.add("engine_0", asyncio.sleep(60))
    with pytest.raises(EngineError, match="refused"):
        await workers.guarded(publish())


async def test_what_does_not_close_in_order_is_named_and_hides_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise StorageError("close the pool: the disk is full")

    class Coordinator:
        class close:
            remote = fail

    given = settings(tmp_path)
    workers = Workers(given, RunFolder.of(given), NoCluster())  # type: ignore[arg-type]
    workers.engines.processes, workers.trainers.ranks, workers.queue.actor = [], [], Coordinator
    await workers.stop()
    assert "the queue coordinator did not close in order: close the pool: the disk is full" in caplog.text


async def test_an_engine_has_its_own_time_to_end_and_who_does_not_end_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pipeline.workers.STOP_TIMEOUT_S", 0.05)
    monkeypatch.setattr("pipeline.workers.STOP_MARGIN_S", 0.0)
    ended = list[str]()

    async def in_time() -> None:
        await asyncio.sleep(0.2)
        ended.append("engine 0")

    async def never() -> None:
        await asyncio.Event().wait()

    given = settings(tmp_path, "--rollout-cleanup-timeout", "5")
    workers = Workers(given, RunFolder.of(given), NoCluster())  # type: ignore[arg-type]
    workers.engines.processes = [SimpleNamespace(name="engine 0", is_kept=False, actor=remote(stop=in_time))]  # type: ignore[list-item]
    workers.trainers.ranks = [remote(close=never)]
    await workers.stop()
    assert ended == ["engine 0"]
    assert "trainer rank 0 did not close within 0.05 s" in caplog.text


def remote(**methods: Any) -> Any:
    """An actor with these methods."""
    return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})
