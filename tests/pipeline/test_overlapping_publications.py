"""A version is published while the next batch trains: what is sent stays what it was, and every end is known."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.actors.trainer import Doing, TrainerActor
from pipeline.held_weights import HeldWeights
from pipeline.messages import decode
from pipeline.publication import Publication
from pipeline.served_weights import ServedWeights, publications_overlap
from pipeline.session import Session
from pipeline.stages import StageBoard
from pipeline.stall_chain import RankActivity
from pipeline.train_loop import TrainLoop
from pipeline.trainer_group import TrainerGroup
from pipeline.trainer_weights import PublishSettings, TrainerWeights
from tests.pipeline.publication_rig import Trainer
from vime.errors import PublicationError


class Publisher:
    """Ends a publication when told to."""

    def __init__(self) -> None:
        self.version, self.behind, self.num_caught_up = 1, list[str](), 0
        self.outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.num_at_once = 0

    @property
    def next_version(self) -> int:
        return self.version + 1

    @property
    def serving(self) -> list[str]:
        return ["http://other"]

    def repeats(self) -> bool:
        return True

    async def publish(self) -> Publication:
        self.num_at_once += 1
        assert self.num_at_once == 1, "one publication at a time"
        try:
            raised = await self.outcome
        finally:
            self.num_at_once -= 1
        self.version += raised
        return published(self.version, raised=raised)

    async def catch_up(self) -> Publication:
        self.num_caught_up += 1
        self.behind = []
        return published(self.version, raised=True)


def published(version: int, *, raised: bool) -> Publication:
    return Publication(version, raised, False, wire_bytes=1, density=1.0, prepare_s=0.0, pause_s=0.0, fenced={})


class Ranks:
    def __init__(self, *, has_room: bool = True) -> None:
        self.has_room, self.is_held = has_room, False

    async def hold_weights(self) -> bool:
        self.is_held = self.has_room
        return self.has_room

    async def let_go_weights(self) -> None:
        self.is_held = False


async def nothing(*_: object) -> None:
    pass


class Evaluations:
    """Their responses come when told to."""

    def __init__(self) -> None:
        self.hold_versions, self.responses = False, asyncio.Event()
        self.responses.set()

    async def responses_are_there(self) -> None:
        await self.responses.wait()


class Rig:
    def __init__(self, *, overlaps: bool = True, has_room: bool = True) -> None:
        self.publisher, self.ranks, self.notes = Publisher(), Ranks(has_room=has_room), list[str]()
        self.evaluations, self.kept = Evaluations(), list[int]()
        parts: Any = (
            self.publisher,
            SimpleNamespace(trainers=self.ranks, queue=self),
            SimpleNamespace(trainers_busy=asyncio.Lock()),
            SimpleNamespace(revive=nothing, release=nothing),
            SimpleNamespace(engines_sleep=False, trainer_leaves=nothing, wake=nothing),
            self.notes.append,
            self.evaluations,
        )
        self.weights = ServedWeights(*parts, overlaps=overlaps)

    async def keep_version(self, policy_version: int) -> None:
        """Of the queue."""
        self.kept.append(policy_version)


async def test_the_trainer_goes_on_while_a_copy_is_published_and_plans_under_its_version() -> None:
    rig = Rig()
    assert await rig.weights.begin_to_publish() is None
    assert (rig.ranks.is_held, rig.weights.is_publishing) == (True, True)
    assert (rig.weights.version, rig.weights.planning_version) == (1, 2)
    rig.publisher.outcome.set_result(True)
    publication = await rig.weights.settle()
    assert publication is not None
    assert (publication.version, rig.weights.planning_version, rig.ranks.is_held) == (2, 2, False)
    assert await rig.weights.settle() is None


@pytest.mark.parametrize("raised", [True, False])
async def test_a_copy_that_is_sent_is_let_go_before_anyone_waits_for_the_publication(raised: bool) -> None:
    rig = Rig()
    await rig.weights.begin_to_publish()
    assert rig.ranks.is_held
    rig.publisher.outcome.set_result(raised)
    while rig.ranks.is_held:
        await asyncio.sleep(0)
    assert rig.weights.is_publishing
    await rig.weights.settle()


async def test_a_version_that_reaches_nobody_is_planned_under_no_longer() -> None:
    rig = Rig()
    await rig.weights.begin_to_publish()
    rig.publisher.outcome.set_result(False)
    await rig.weights.settle()
    assert (rig.weights.version, rig.weights.planning_version) == (1, 1)


@pytest.mark.parametrize(("is_planned", "version", "kept"), [(False, 1, [1]), (True, 2, [])])
async def test_groups_begin_for_a_batch_whose_version_reached_nobody_unless_it_is_planned(
    is_planned: bool, version: int, kept: list[int]
) -> None:
    rig = Rig()
    await rig.weights.begin_to_publish()
    planned_under = [rig.weights.plan_under()] if is_planned else []
    rig.publisher.outcome.set_result(False)
    await asyncio.sleep(0.01)
    assert rig.weights.is_publishing
    assert rig.kept == kept, "no group may be begun before, where --max-staleness bounds them"
    assert (planned_under or [rig.weights.plan_under()]) == [version]


@pytest.mark.parametrize(("overlaps", "has_room"), [(False, True), (True, False)])
async def test_without_room_or_leave_the_trainer_waits(overlaps: bool, has_room: bool) -> None:
    rig = Rig(overlaps=overlaps, has_room=has_room)
    rig.publisher.outcome.set_result(True)
    publication = await rig.weights.begin_to_publish()
    assert publication is not None
    assert publication.version == 2
    assert not rig.weights.is_publishing


async def test_what_a_publication_fails_with_is_raised_where_it_is_waited_for() -> None:
    rig = Rig()
    await rig.weights.begin_to_publish()
    rig.publisher.outcome.set_exception(PublicationError("no engine serves"))
    with pytest.raises(PublicationError, match="no engine serves"):
        await rig.weights.settle()
    assert not rig.weights.is_publishing
    assert not rig.ranks.is_held, "else the next publication would send the same weights under another version"


async def test_a_wait_for_samples_ends_with_what_a_publication_beside_it_has_failed_with() -> None:
    rig = Rig()
    loop: Any = object.__new__(TrainLoop)
    loop._commits, loop._weights = SimpleNamespace(check=lambda: None), rig.weights
    await rig.weights.begin_to_publish()
    rig.weights.check()
    rig.publisher.outcome.set_exception(PublicationError("no engine serves"))
    await asyncio.sleep(0.01)
    with pytest.raises(PublicationError, match="no engine serves"):
        loop._stop_when_too_many_failed(None)


class CommitLog:
    """What becomes of commits, in order; the ranks may go on while one is written."""

    def __init__(self) -> None:
        self.newest: tuple[str, int] | None = None
        self.done: list[str] = []

    async def commit(self, _start: object, rollout_id: int, weight_version: int) -> None:
        self.done.append(f"copied {rollout_id} under version {weight_version}")

    async def settle(self) -> None:
        self.done.append("on disk")

    def check(self) -> None:
        """Nothing is wrong with them."""


@pytest.fixture
def loop_of() -> Callable[[Rig, CommitLog], Any]:
    """A loop that has trained its first batch of two, whose commit is due."""

    def make(rig: Rig, commits: CommitLog) -> Any:
        loop: Any = object.__new__(TrainLoop)
        groups = SimpleNamespace(release_train=False, save_interval=1, update_weights_interval=1)
        loop._settings = SimpleNamespace(cluster=groups, checkpoint=groups, weights=groups)
        loop._evaluations = SimpleNamespace(schedule=SimpleNamespace(num_rollout=2, is_due=lambda _: False))
        loop._workers = SimpleNamespace(guarded=lambda work: work)
        loop._stages, loop._interrupts = StageBoard(), SimpleNamespace(stop_asked=False)
        loop._weights, loop._commits, loop.start = rig.weights, commits, None
        loop.done_rollouts, loop._num_rollout = 1, 2
        return loop

    return make


async def test_a_commit_that_is_due_does_not_wait_for_a_publication_that_never_ends(
    loop_of: Callable[[Rig, CommitLog], Any],
) -> None:
    rig, commits = Rig(), CommitLog()
    await rig.weights.begin_to_publish()
    working = asyncio.create_task(loop_of(rig, commits)._commit_and_publish(0))
    while not commits.done and not working.done():
        await asyncio.sleep(0)
    assert commits.done == ["copied 0 under version 2"]
    working.cancel()


async def test_what_is_due_is_committed_though_the_publication_beside_it_fails(
    loop_of: Callable[[Rig, CommitLog], Any],
) -> None:
    rig, commits = Rig(), CommitLog()
    loop = loop_of(rig, commits)
    loop._one_batch = loop._commit_and_publish
    loop.done_rollouts = 0
    await rig.weights.begin_to_publish()
    rig.publisher.outcome.set_exception(PublicationError("no engine serves"))
    with pytest.raises(PublicationError, match="no engine serves"):
        await loop.run()
    assert commits.done == ["copied 0 under version 2", "on disk"], "one that is being written would be given up"


async def test_the_last_batch_is_committed_though_the_last_publication_fails(
    loop_of: Callable[[Rig, CommitLog], Any],
) -> None:
    rig, commits = Rig(), CommitLog()
    loop = loop_of(rig, commits)
    session: Any = object.__new__(Session)
    session._workers = loop._workers
    await rig.weights.begin_to_publish()
    rig.publisher.outcome.set_exception(PublicationError("no engine serves"))
    with pytest.raises(PublicationError, match="no engine serves"):
        await session._come_to_rest(loop, rig.weights)
    assert commits.done == ["on disk", "copied 0 under version 1", "on disk"]


async def test_a_rank_tells_of_the_publication_beside_its_model() -> None:
    held, hanging = HeldWeights(0), threading.Event()
    held.is_held = True
    actor: Any = object.__new__(TrainerActor)
    actor._built = SimpleNamespace(weights=SimpleNamespace(held=held), num_steps=3)
    actor._training, actor._publication = Doing(), Doing()
    with ThreadPoolExecutor(1) as actor._publishing:
        sending = asyncio.create_task(actor._on_publication(hanging.wait, "sends weights"))
        while not (told := decode(await actor.activity(), RankActivity)).beside:
            await asyncio.sleep(0)
        assert (told.doing, told.beside, told.num_steps) == ("", "sends weights", 3)
        assert 0 <= told.beside_s < 60
        hanging.set()
        await sending
        assert decode(await actor.activity(), RankActivity).beside == ""


async def test_an_engine_that_returns_waits_for_the_publication_under_way() -> None:
    rig = Rig()
    await rig.weights.begin_to_publish()
    rig.publisher.behind = ["http://engine"]
    returning = asyncio.create_task(rig.weights.bring_back())
    await asyncio.sleep(0)
    assert rig.publisher.num_caught_up == 0
    rig.publisher.outcome.set_result(True)
    await returning
    assert rig.publisher.num_caught_up == 1
    told = await rig.weights.settle()
    assert told is not None
    assert told.version == 2, "the record of the batch tells of it"
    assert await rig.weights.settle() is None


async def test_the_trainer_does_not_wait_for_an_evaluation_that_holds_up_a_version() -> None:
    rig = Rig()
    rig.evaluations.responses.clear()
    await rig.weights.begin_to_publish()
    await asyncio.sleep(0)
    assert (rig.publisher.num_at_once, rig.ranks.is_held) == (0, True)
    rig.evaluations.responses.set()
    rig.publisher.outcome.set_result(True)
    assert (await rig.weights.settle()) is not None


async def test_a_publication_that_is_given_up_has_ended() -> None:
    rig = Rig()
    await rig.weights.begin_to_publish()
    await asyncio.sleep(0)
    await rig.weights.abandon()
    assert (rig.publisher.num_at_once, rig.weights.is_publishing) == (0, False)


@pytest.mark.parametrize(
    ("changes", "num_gpus", "overlaps"),
    [
        ({}, 1, True),
        ({}, 0, False),
        ({"update_weights_while_training": "on"}, 0, True),
        ({"update_weights_while_training": "off"}, 1, False),
        ({"max_staleness": 0}, 1, False),
        ({"colocate": True}, 1, False),
        ({"release_train": True}, 1, False),
        ({"engines_leave_memory": True}, 1, False),
    ],
)
def test_publications_overlap_only_where_nobody_takes_turns(
    changes: dict[str, Any], num_gpus: int, overlaps: bool
) -> None:
    given = {
        "update_weights_while_training": "auto",
        "max_staleness": None,
        "colocate": False,
        "release_train": False,
        "engines_leave_memory": False,
    } | changes
    group = SimpleNamespace(**given)
    settings: Any = SimpleNamespace(weights=group, queue=group, cluster=group)
    assert publications_overlap(settings, num_gpus) == overlaps


def sent_by(rank: TrainerWeights) -> list[tuple[str, list[float]]]:
    return [(name, tensor.flatten().tolist()) for name, tensor in rank._weights()]


@pytest.fixture
def ranks() -> Callable[[int], tuple[Trainer, TrainerWeights]]:
    def make(number: int) -> tuple[Trainer, TrainerWeights]:
        trainer = Trainer()
        return trainer, TrainerWeights(trainer, number, PublishSettings())

    return make


def test_what_is_held_is_sent_whatever_the_trainer_does_meanwhile(
    ranks: Callable[[int], tuple[Trainer, TrainerWeights]],
) -> None:
    trainer, rank = ranks(0)
    before = sent_by(rank)
    rank.hold()
    trainer.step()
    assert sent_by(rank) == before
    rank.let_go()
    after = sent_by(rank)
    assert after != before
    rank.hold()
    trainer.step()
    assert sent_by(rank) == after, "the memory of the version before is used again"


def test_ranks_that_send_nothing_gather_nothing_while_weights_are_held(
    ranks: Callable[[int], tuple[Trainer, TrainerWeights]],
) -> None:
    _, rank = ranks(1)
    rank.hold()
    assert sent_by(rank) == []


def test_a_rank_holds_nothing_before_it_knows_how_much(ranks: Callable[[int], tuple[Trainer, TrainerWeights]]) -> None:
    assert not ranks(0)[1].can_hold()


def test_a_copy_leaves_a_gpu_its_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 4 << 30)
    held = HeldWeights(0)
    assert held.fits(2 << 30)
    assert not held.fits(3 << 30)
    assert held.fits(1 << 30, largest_part=300 << 20)
    assert not held.fits(1 << 30, largest_part=500 << 20)


def test_a_copy_has_memory_only_while_it_is_held(ranks: Callable[[int], tuple[Trainer, TrainerWeights]]) -> None:
    _, rank = ranks(0)
    assert rank.hold()
    assert list(rank.held) != []
    rank.let_go()
    assert list(rank.held) == []


class OneRank:
    """Of a trainer's processes, one whose memory is too little or not."""

    def __init__(self, *, is_enough: bool) -> None:
        self._is_enough, self.is_held = is_enough, False
        self.can_hold_weights = self._remote(lambda: True)
        self.hold_weights, self.let_go_weights = self._remote(self._hold), self._remote(self._let_go)

    def _hold(self) -> bool:
        self.is_held = self._is_enough
        return self._is_enough

    def _let_go(self) -> None:
        self.is_held = False

    @staticmethod
    def _remote(call: Callable[[], Any]) -> Any:
        async def answer() -> Any:
            return call()

        return SimpleNamespace(remote=answer)


async def test_a_rank_whose_memory_is_too_little_after_all_has_the_others_let_go() -> None:
    group: Any = object.__new__(TrainerGroup)
    group.ranks = [OneRank(is_enough=False), OneRank(is_enough=True)]
    assert not await group.hold_weights()
    assert [rank.is_held for rank in group.ranks] == [False, False]
    group.ranks = [OneRank(is_enough=True), OneRank(is_enough=True)]
    assert await group.hold_weights()
    assert [rank.is_held for rank in group.ranks] == [True, True]


def test_without_memory_for_a_copy_the_trainer_gathers_to_the_end_and_its_own_weights_are_sent(
    ranks: Callable[[int], tuple[Trainer, TrainerWeights]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, rank = ranks(0)
    num_gathered = 0

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal num_gathered
        for named in Trainer().named_hf_weights():
            num_gathered += 1
            yield named

    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", full)
        patch.setattr(trainer, "named_hf_weights", gathered)
        assert not rank.hold()
    assert num_gathered == 2, "the other ranks gather with it"
    trainer.step()
    assert sent_by(rank) == [(name, tensor.flatten().tolist()) for name, tensor in trainer.named_hf_weights()]
    assert list(rank.held) == [], "what was held keeps no memory"
