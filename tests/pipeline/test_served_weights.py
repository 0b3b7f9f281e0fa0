"""Which weights serve in a session, and when others may take their place."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.publication import Publication
from pipeline.served_weights import ServedWeights


class Session:
    """What `ServedWeights` is given; an evaluation goes on until `responses` is set."""

    def __init__(self, *, serves: bool = True) -> None:
        self.serving, self.version, self.behind = ["e"] if serves else [], 1, list[str]()
        self.woken: list[list[str]] = []
        self.responses, self.done = asyncio.Event(), list[str]()
        this = cast(Any, self)
        self.weights = ServedWeights(this, this, this, this, this, self.done.append, this)
        self.queue = self
        self.trainers_busy, self.engines_sleep = asyncio.Lock(), False

    @property
    def hold_versions(self) -> bool:
        return not self.responses.is_set()

    async def responses_are_there(self) -> None:
        await self.responses.wait()
        self.done.append("evaluated")

    async def publish(self) -> Publication:
        self.version += 1
        self.done.append(f"published {self.version}")
        return cast(Publication, SimpleNamespace(version=self.version, raised=True, returned=[], fenced={}))

    async def guarded(self, work: Any) -> Any:
        return await work

    async def wake(self, serving: list[str]) -> None:
        self.woken.append(serving)

    async def serve(self, version: int, serving: list[str]) -> None:
        self.done.append(f"{serving} under {version}")

    async def nothing(self, *_: object) -> None:
        """Of the calls that have no part here."""

    keep_version = record_processes = release = revive = nothing

    def sender_is_new(self) -> None:
        self.done.append("another trainer")


@pytest.mark.parametrize("after", ["publish_of_new_trainer", "publish_and_tell"])
async def test_no_new_version_comes_under_an_evaluation(after: str) -> None:
    session = Session()
    changing = asyncio.create_task(getattr(session.weights, after)())
    await asyncio.wait([changing], timeout=0.05)
    assert session.version == 1
    session.responses.set()
    await asyncio.wait_for(changing, 5)
    assert session.done[-2:] == ["evaluated", "published 2"]


async def test_an_engine_that_needs_a_new_version_waits_for_an_evaluation_and_the_run_does_not() -> None:
    session = Session()
    await asyncio.wait_for(session.weights.bring_back(), 5)
    assert session.done == []
    session.responses.set()
    await session.weights.bring_back()
    assert session.done == ["evaluated", "published 2"]


async def test_after_a_publication_whoever_may_be_asked_is_awake() -> None:
    session = Session()
    session.responses.set()
    await session.weights.publish()
    assert session.woken == [["e"]]


async def test_an_evaluation_that_outlives_the_last_batch_goes_on_at_the_engines_that_serve() -> None:
    for serves, done in ((True, ["['e'] under 1"]), (False, [])):
        session = Session(serves=serves)
        await session.weights.serve_on()
        assert session.done == done


async def test_engines_that_serve_nothing_are_not_waited_for() -> None:
    session = Session(serves=False)
    await asyncio.wait_for(session.weights.bring_back(), 5)
    assert session.done == ["published 2"]
