"""An engine that was fenced from outside and replaced serves again only with the version that the others serve."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from pipeline.engine_return import engines_brought_back
from pipeline.publication import Publication
from pipeline.weight_transports.disk import DiskSettings
from tests.pipeline.publication_rig import Rig, is_running, two_engines
from tests.support.standin_engine import StandinEngine


@pytest.fixture
def engines() -> Iterator[list[StandinEngine]]:
    with two_engines(step_s=0.005) as engines:
        yield engines


async def die_and_return(rig: Rig, number: int = 1, elsewhere: StandinEngine | None = None) -> None:
    """As the keeper tells it: fenced, then running anew, at another address with `elsewhere`."""
    engine = rig.engines[number]
    engine.faults.dead = True
    await rig.publisher.fence(engine.address, "it died")
    if elsewhere is None:
        engine.start_anew()
        await rig.publisher.readmit(engine.address)
    else:
        await rig.publisher.readmit(engine.address, elsewhere.address)


async def test_a_dead_engine_gets_no_requests_and_publications_go_on_without_it(engines: list[StandinEngine]) -> None:
    async with Rig(engines) as rig:
        await rig.publish()
        engines[1].faults.dead = True
        await rig.publisher.fence(engines[1].address, "it died")
        assert rig.admission.serving == [engines[0].address]
        publication = await rig.publish()
        assert (publication.version, publication.raised) == (2, True)
        assert publication.fenced == {engines[1].address: "it died"}
        assert rig.publisher.behind == [], "nothing can be published to a process that isn't there"


async def test_an_engine_that_was_given_up_makes_no_later_version_whole(
    engines: list[StandinEngine], tmp_path: Path
) -> None:
    async with Rig(engines, folder=tmp_path) as rig:
        await rig.publish()
        engines[1].faults.dead = True
        await rig.publisher.fence(engines[1].address, "it died")
        await rig.publish()
        await rig.publisher.give_up(engines[1].address)
        rig.admission.said.clear()
        publication = await rig.publish()
        assert rig.source.written == [(1, False), (2, True), (3, False)]
        assert (publication.version, publication.raised, publication.fenced) == (3, True, {})
        assert rig.admission.said == ["pause", "resume 3"]
        assert rig.publisher.behind == []
        assert rig.publisher.fenced == {engines[1].address: "it died"}, "whoever asks is still told why it is silent"
        await rig.check_standing()


async def test_whoever_follows_the_engines_is_told_who_gets_no_requests_and_why(engines: list[StandinEngine]) -> None:
    told: list[dict[str, str]] = []
    async with Rig(engines, tell_fenced=lambda fenced: told.append(dict(fenced))) as rig:
        await rig.publish()
        await die_and_return(rig)
        assert told == [{}, {engines[1].address: "it died"}]
        await rig.publisher.catch_up()
        engines[1].faults.num_failed_updates = 1
        await rig.publish()
        assert told[2] == {}
        assert list(told[3]) == [engines[1].address]


async def test_a_replaced_engine_confirms_the_version_that_serves_while_the_others_sample_on(
    engines: list[StandinEngine],
) -> None:
    async with Rig(engines) as rig:
        await rig.publish()
        await rig.publish()
        await die_and_return(rig)
        assert rig.publisher.behind == [engines[1].address]
        running = rig.generate(0, max_tokens=200)
        await is_running(rig)
        rig.admission.said.clear()
        before = rig.publisher.moment
        publication = await rig.publisher.catch_up()
        assert rig.publisher.moment != before, "a check that it ran into can be told"
        assert (publication.version, publication.fenced) == (2, {})
        assert rig.admission.said == ["resume 2"], "admission is not paused for an engine that serves nothing"
        assert len(rig.admission.serving) == 2
        result = await running
        assert result.finish_reason == "length"
        rig.check_labels(0, result)
        await rig.check_standing()
        assert (await rig.publish()).version == 3
        await rig.check_standing()


async def test_an_engine_that_went_to_another_node_gets_the_version_and_requests_there(
    engines: list[StandinEngine],
) -> None:
    told: list[list[str]] = []
    with StandinEngine(required_names=frozenset("ab")) as elsewhere:
        async with Rig(engines, tell_fenced=lambda fenced: told.append(sorted(fenced))) as rig:
            await rig.publish()
            await die_and_return(rig, elsewhere=elsewhere)
            assert rig.publisher.behind == told[-1] == [elsewhere.address]
            publication = await rig.publisher.catch_up()
            assert (publication.version, publication.returned) == (1, [elsewhere.address])
            assert elsewhere.version == "1"
            assert sorted(rig.admission.serving) == sorted([engines[0].address, elsewhere.address])
            assert (await rig.publish()).fenced == {}
            assert elsewhere.version == "2"


async def test_a_replaced_engine_that_does_not_confirm_stays_fenced(engines: list[StandinEngine]) -> None:
    async with Rig(engines, timeout_s=3.0) as rig:
        await rig.publish()
        await die_and_return(rig)
        engines[1].faults.steps["/finish_weight_update"] = "error"
        publication = await rig.publisher.catch_up()
        assert set(publication.fenced) == {engines[1].address}
        assert rig.admission.serving == [engines[0].address]
        engines[1].faults.steps.clear()
        assert not (await rig.publisher.catch_up()).fenced
        await rig.check_standing()


async def replaced_during_a_publication(rig: Rig, elsewhere: StandinEngine | None = None) -> Publication:
    """The second engine confirms the version, dies, and runs anew with other weights before the publication is over."""
    first, second = rig.engines
    await rig.publish()
    first.faults.steps["/finish_weight_update"] = "hang"
    publishing = asyncio.create_task(rig.publish())
    while second.version != "2":
        await asyncio.sleep(0.01)
    await die_and_return(rig, elsewhere=elsewhere)
    first.faults.steps.clear()
    return await publishing


async def test_an_engine_that_was_replaced_during_a_publication_does_not_count_as_current(
    engines: list[StandinEngine],
) -> None:
    async with Rig(engines) as rig:
        publication = await replaced_during_a_publication(rig)
        assert publication.raised
        assert set(publication.fenced) == {engines[1].address}
        assert rig.admission.serving == [engines[0].address]
        await rig.publisher.catch_up()
        await rig.check_standing()


async def test_an_engine_that_moved_during_a_publication_does_not_count_as_current(
    engines: list[StandinEngine],
) -> None:
    with StandinEngine(required_names=frozenset("ab")) as elsewhere:
        async with Rig(engines) as rig:
            publication = await replaced_during_a_publication(rig, elsewhere)
            assert publication.fenced == {elsewhere.address: "it died"}
            assert rig.admission.serving == [engines[0].address]
            await rig.publisher.catch_up()
            assert elsewhere.version == "2"


async def test_a_publication_waits_for_an_engine_when_all_are_being_replaced(engines: list[StandinEngine]) -> None:
    async with Rig(engines[:1]) as rig:
        await rig.publish()
        engines[0].faults.dead = True
        await rig.publisher.fence(engines[0].address, "it died")
        assert rig.admission.serving == []
        publishing = asyncio.create_task(rig.publish())
        await asyncio.sleep(0.1)
        assert not publishing.done()
        engines[0].start_anew()
        await rig.publisher.readmit(engines[0].address)
        publication = await publishing
        assert (publication.version, publication.raised, publication.fenced) == (2, True, {})


async def test_an_engine_that_publications_cannot_reach_is_replaced(engines: list[StandinEngine]) -> None:
    asked: list[str] = []
    async with Rig(engines, timeout_s=2.0, replace=lambda address, _: asked.append(address)) as rig:
        await rig.publish()
        engines[1].faults.steps["/pause"] = "error"
        await rig.publish()
        assert asked == [], "the next publication may repair it"
        await rig.publish()
        assert asked == [engines[1].address]


async def test_the_only_engine_is_replaced_at_the_first_publication_that_it_fails(
    engines: list[StandinEngine],
) -> None:
    def replace(address: str, reason: str) -> None:
        async def replaced() -> None:
            await rig.publisher.fence(address, reason)
            engines[0].start_anew()
            await rig.publisher.readmit(address)

        replacing.append(asyncio.create_task(replaced()))

    replacing: list[asyncio.Task[None]] = []
    async with Rig(engines[:1], timeout_s=2.0, replace=replace) as rig:
        await rig.publish()
        engines[0].faults.steps["/update_weights"] = "error"
        publication = await rig.publish()
        assert (publication.raised, publication.fenced, len(replacing)) == (True, {}, 1)
        await rig.check_standing()


@pytest.mark.parametrize(("local", "repeats"), [(False, True), (True, False)])
async def test_a_version_on_disk_is_repeated_while_its_folder_is_there(
    engines: list[StandinEngine], tmp_path: Path, local: bool, repeats: bool
) -> None:
    disk = DiskSettings(local_dir=tmp_path / "local" if local else None)
    async with Rig(engines, folder=tmp_path, disk=disk) as rig:
        await rig.publish()
        await die_and_return(rig)
        assert rig.publisher.repeats() == repeats
        if repeats:
            rig.trainer.step()  # the folder counts, not what the trainer holds by now
            await rig.publisher.catch_up()
            assert rig.source.written == [(1, False)] or rig.source.written == [(1, True)]
        else:
            await rig.publish()
        await rig.check_standing()


async def test_a_version_that_serves_stays_on_disk_when_an_engine_fails_to_catch_up_with_it(
    engines: list[StandinEngine], tmp_path: Path
) -> None:
    async with Rig(engines, folder=tmp_path, disk=DiskSettings(), timeout_s=3.0) as rig:
        await rig.publish()
        await die_and_return(rig)
        engines[1].faults.steps["/finish_weight_update"] = "error"
        assert set((await rig.publisher.catch_up()).fenced) == {engines[1].address}
        engines[1].faults.steps.clear()
        assert rig.publisher.repeats()
        assert not (await rig.publisher.catch_up()).fenced
        assert len(rig.source.written) == 1
        await rig.check_standing()


class Behind:
    """Engines that are behind when told so."""

    def __init__(self, bring_back: Callable[[], Awaitable[None]]) -> None:
        self.behind: list[str] = []
        self.told = asyncio.Event()
        self._bring_back = bring_back

    async def bring_back(self) -> None:
        await self._bring_back()

    async def someone_is_behind(self) -> None:
        await self.told.wait()
        self.told.clear()


async def test_engines_are_brought_back_during_a_wait_and_never_after_it() -> None:
    over, calls = asyncio.Event(), []
    going_on = asyncio.Event()

    async def bring_back() -> None:
        calls.append("begun")
        over.set()  # the wait is over in the middle of it
        await asyncio.sleep(0.05)
        calls.append("done")

    async def wait() -> str:
        going_on.set()
        await over.wait()
        return "batch"

    engines = Behind(bring_back)
    waiting = asyncio.create_task(engines_brought_back(wait(), engines))
    await going_on.wait()
    engines.told.set()
    assert await waiting == "batch"
    assert calls == ["begun", "done"], "a publication under way is finished first"
    engines.told.set()
    await asyncio.sleep(0.01)
    assert calls == ["begun", "done"]


async def test_what_goes_wrong_in_bringing_engines_back_ends_the_wait() -> None:
    async def bring_back() -> None:
        raise ValueError("no version")

    engines = Behind(bring_back)
    engines.told.set()

    with pytest.raises(ValueError, match="no version"):
        await engines_brought_back(asyncio.sleep(60), engines)


async def test_what_goes_wrong_in_bringing_engines_back_when_the_wait_is_over_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, over = asyncio.Event(), asyncio.Event()

    async def bring_back() -> None:
        begun.set()
        await over.wait()
        for _ in range(10):  # what is waited for ends first
            await asyncio.sleep(0)
        raise ValueError("no version")

    async def wait() -> str:
        await over.wait()
        return "batch"

    engines = Behind(bring_back)
    engines.told.set()
    waiting = asyncio.create_task(engines_brought_back(wait(), engines))
    await begun.wait()
    over.set()
    assert await waiting == "batch"
    assert "engines were not brought back: no version" in caplog.text
