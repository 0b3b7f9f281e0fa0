"""The ranks' processes: their environment, and their end and new start with --release-train."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint import load

from pipeline.actors.trainer import TrainerActor
from pipeline.cluster import Cluster
from pipeline.coordinator_config import CoordinatorConfig
from pipeline.node_devices import ProcessPlace
from pipeline.run_folder import RunFolder
from pipeline.workers import Workers
from tests.end_to_end.jobs import Job
from tests.support.tiny_models import VOCAB_SIZE
from vime.errors import RunFailedError, StalledError, StorageError
from vime.settings.groups import QueueSettings
from vime.settings.resolve import resolve
from vime.settings.rules.quantities import demand_of

NOTES: list[str] = []


class Rank:
    """A rank's actor: every call is noted; `watch` ends when the process does."""

    def __init__(self, number: int, env: dict[str, str] | None) -> None:
        self.env = env
        self.calls: list[str] = []
        self.ended = asyncio.Event()
        answers = {"rendezvous": f"tcp://meet:{number}", "build": 2, "close": None, "pid": number}
        for name, value in answers.items():
            setattr(self, name, SimpleNamespace(remote=self._answering(name, value)))
        self.watch = SimpleNamespace(remote=self._watch)

    def _answering(self, name: str, value: object) -> Any:
        async def answer(*given: object) -> object:
            self.calls.append(" ".join([name, *(str(item) for item in given if item is not None)]))
            return value

        return answer

    async def _watch(self) -> None:
        await self.ended.wait()
        raise RunFailedError("killed")


class Ranks:
    """A cluster that starts ranks only."""

    def __init__(self) -> None:
        self.started: list[Rank] = []
        self.moved = ""

    async def leave_lost_nodes(self, engine: int | None) -> str:
        assert engine is None
        return self.moved

    def spawn_worker(self, actor: type, bundle: int, *_: Any, env: dict[str, str] | None = None) -> Any:
        if actor is not TrainerActor:
            return None
        assert bundle in (0, 1)
        self.started.append(Rank(len(self.started), env))
        return self.started[-1]

    def engine_places(self, number: int) -> list[ProcessPlace]:
        return [ProcessPlace(f"node{number}", "127.0.0.1")]

    def end(self, actor: Rank) -> None:
        """As a process: it is told to end, and is gone somewhat later."""
        asyncio.get_running_loop().call_later(0.05, actor.ended.set)


@pytest.fixture
def workers(tmp_path: Path) -> Workers:
    words = ["--save", str(tmp_path / "run"), "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1"]
    settings = resolve([*words, "--train-env-vars", '{"NCCL_DEBUG": "INFO", "LEVEL": 3}']).settings
    folder = RunFolder.of(settings)
    folder.make()
    return Workers(settings, folder, Ranks(), NOTES.append)  # type: ignore[arg-type]


async def work() -> str:
    await asyncio.sleep(0)
    return "done"


async def test_ranks_get_the_environment_of_the_flag_as_text(workers: Workers) -> None:
    assert [rank.env for rank in workers.trainers.ranks] == [{"NCCL_DEBUG": "INFO", "LEVEL": "3"}] * 2


async def test_released_ranks_close_end_and_are_missed_by_nobody(workers: Workers) -> None:
    assert await workers.start_trainers() == 2
    workers.trainers.watch()
    first = list(workers.trainers.ranks)
    await workers.guarded(workers.trainers.release())
    assert workers.trainers.ranks == []
    assert [rank.calls[-1] for rank in first] == ["close", "close"]
    assert all(rank.ended.is_set() for rank in first)
    assert await workers.guarded(work()) == "done"


async def test_ranks_start_anew_after_a_release_and_their_end_counts_again(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.process_watch.DEATH_S", 0.1)
    await workers.start_trainers()
    workers.trainers.watch()
    await workers.trainers.release()
    await workers.start_trainers()
    workers.trainers.watch()
    assert [rank.calls for rank in workers.trainers.ranks] == [
        ["rendezvous", "build tcp://meet:2 2"],
        ["build tcp://meet:2 2"],
    ]
    workers.trainers.ranks[1].ended.set()
    with pytest.raises(RunFailedError, match=r"trainer_1 ended unexpectedly \(killed\)"):
        await workers.guarded(asyncio.sleep(60))


async def test_ranks_that_have_lost_their_node_start_on_another_one_that_sees_the_queues_folder(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    NOTES.clear()
    proven: list[Path] = []

    async def prove(folder: Path, _: QueueSettings) -> None:
        proven.append(folder)

    monkeypatch.setattr("pipeline.node_moves.prove_nodes", prove)
    await workers.start_trainers()
    assert (NOTES, proven) == ([], [])
    await workers.trainers.abandon()
    cluster = workers.trainers._cluster
    cluster.moved = "Lost from the Ray cluster: a. Started on b instead: trainer rank 1."  # type: ignore[attr-defined]
    await workers.start_trainers()
    assert NOTES == ["Lost from the Ray cluster: a. Started on b instead: trainer rank 1."]
    assert [path.name for path in proven] == ["pool"]
    assert len(workers.trainers.ranks) == 2


async def test_a_node_that_does_not_see_the_queues_folder_is_refused_again_by_the_next_start_there(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_mounted = False

    async def prove(folder: Path, _: QueueSettings) -> None:
        if not is_mounted:
            raise StorageError(f"{folder} is not there")

    monkeypatch.setattr("pipeline.node_moves.prove_nodes", prove)
    await workers.trainers.abandon()
    cluster = workers.trainers._cluster
    for cluster.moved in ("Lost: a. Started on b instead: trainer rank 1.", ""):  # type: ignore[attr-defined]
        with pytest.raises(StorageError, match="is not there"):
            await workers.start_trainers()
    assert workers.trainers.ranks == []
    is_mounted = True
    await workers.start_trainers()
    assert len(workers.trainers.ranks) == 2


@pytest.mark.parametrize(
    ("rank", "call", "words"),
    [
        (0, "rendezvous", "find an address for the ranks"),
        (1, "build", "build its model"),
        (1, "load_start", "load the first weights"),
        (1, "load", "load the checkpoint of rollout 3"),
    ],
)
async def test_a_rank_that_does_not_get_ready_is_named_with_what_it_was_asked_for(
    workers: Workers, rank: int, call: str, words: str
) -> None:
    trainers = workers.trainers
    trainers._patience_s = 0.05
    hanging = asyncio.Event()
    setattr(trainers.ranks[rank], call, SimpleNamespace(remote=lambda *_: hanging.wait()))
    setattr(trainers.ranks[1 - rank], call, SimpleNamespace(remote=lambda *_: asyncio.sleep(0, 1)))
    calls = {
        "rendezvous": lambda: trainers.start(None),
        "build": lambda: trainers.start(None),
        "load_start": trainers.load_start,
        "load": lambda: trainers.load("/run", 3),
    }
    with pytest.raises(StalledError, match=f"trainer rank {rank} did not {words}.* within 0.05 s"):
        await calls[call]()


async def test_ranks_that_live_are_not_started_twice(workers: Workers) -> None:
    before = list(workers.trainers.ranks)
    await workers.start_trainers()
    assert workers.trainers.ranks == before


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(400)
def test_a_released_rank_gives_its_place_to_one_that_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    """With Ray and Megatron: the first weights, a release, a start, and the same weights from the checkpoint."""
    job = Job(tmp_path, flags={"--trainer-num-threads": 1}, switches=("--release-train",))
    job.prepare()
    settings = resolve(job.command()[4:]).settings
    folder = RunFolder.of(settings)
    folder.make()
    directory = str(folder.root)

    async def session(cluster: Cluster) -> tuple[list[int], list[int]]:
        workers = Workers(settings, folder, cluster)
        try:
            await workers.queue.start(CoordinatorConfig("b", [], 1, 1, 60))
            await workers.start_trainers()
            await workers.on_trainers(lambda rank: rank.load_start.remote())
            await workers.on_trainers(lambda rank: rank.save.remote(directory, 0))
            workers.trainers.watch()
            before = await workers.on_trainers(lambda rank: rank.pid.remote())
            await workers.guarded(workers.trainers.release())
            await workers.start_trainers()
            await workers.on_trainers(lambda rank: rank.load.remote(directory, 0))
            await workers.on_trainers(lambda rank: rank.save.remote(directory, 1))
            return before, await workers.on_trainers(lambda rank: rank.pid.remote())
        finally:
            await workers.stop()

    with Cluster(demand_of(settings), 0) as cluster:
        before, after = asyncio.run(session(cluster))
    assert before != after
    assert not psutil.pid_exists(before[0])
    first, second = (stored_weights(folder.root / f"iter_000000{number}") for number in (0, 1))
    assert first.std() > 0.01
    assert torch.equal(first, second)


def stored_weights(checkpoint: Path) -> torch.Tensor:
    """The embedding, which is the head too."""
    state = {"embedding.word_embeddings.weight": torch.zeros(VOCAB_SIZE, 128)}
    load(state, checkpoint_id=checkpoint, no_dist=True)
    return state["embedding.word_embeddings.weight"]
