"""Publication: verified before the version rises; an engine is never left paused on old weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.publisher import MAX_FAILED
from pipeline.weight_transports.transport import Failures
from tests.pipeline.publication_rig import Rig, Trainer, is_running, two_engines
from tests.support.standin_engine import StandinEngine
from vime.errors import PublicationError


@pytest.fixture
def engines() -> Iterator[list[StandinEngine]]:
    with two_engines() as engines:
        yield engines


async def test_every_engine_holds_the_new_version_and_runs(engines: list[StandinEngine]) -> None:
    async with Rig(engines) as rig:
        publication = await rig.publish()
        assert (publication.version, publication.raised, publication.flushed) == (1, True, True)
        assert publication.wire_bytes == 48
        assert rig.admission.said == ["pause", "resume 1"]
        assert len(rig.admission.serving) == 2
        await rig.check_standing()


async def test_versions_rise_by_one_and_continue_after_a_resume(engines: list[StandinEngine]) -> None:
    async with Rig(engines, start_version=7) as rig:
        assert [(await rig.publish()).version for _ in range(3)] == [8, 9, 10]


async def test_a_number_is_kept_before_any_engine_hears_of_it(engines: list[StandinEngine]) -> None:
    noted: list[tuple[int, list[str]]] = []
    kept: list[str] = ["space"]

    def note(version: int) -> None:
        noted.append((version, [engine.version for engine in engines]))
        if not kept:
            raise PublicationError("its number can't be kept: the disk is full.")

    async with Rig(engines, note_tried=note) as rig:
        await rig.publish()
        kept.clear()
        assert not (await rig.publish()).raised
        await rig.check_standing()
        kept.append("space")
        assert (await rig.publish()).version == 3
    assert [version for version, _ in noted] == [1, 2, 3]
    assert not any(str(version) in held for version, held in noted)


async def test_kept_requests_go_on_with_the_new_weights(engines: list[StandinEngine]) -> None:
    engines[0].faults.step_s = 0.02
    async with Rig(engines) as rig:
        await rig.publish()
        running = rig.generate()
        await is_running(rig)
        publication = await rig.publish()
        result = await running
        assert not publication.flushed
        assert result.finish_reason == "length"
        assert [span.version for span in result.version_spans] == [1, 2]
        rig.check_labels(0, result)


async def test_flushing_publication_aborts_running_requests_and_drops_the_cache(engines: list[StandinEngine]) -> None:
    engines[0].faults.step_s = 0.02
    async with Rig(engines, flush_interval=1) as rig:
        await rig.publish()
        running = rig.generate(max_tokens=500)
        await is_running(rig)
        engines[0].cache.add(("salt", (1, 2)))
        assert (await rig.publish()).flushed
        assert (await running).finish_reason == "abort"
        assert not engines[0].cache


async def test_kept_publication_leaves_the_cache(engines: list[StandinEngine]) -> None:
    async with Rig(engines) as rig:
        await rig.publish()
        engines[0].cache.add(("salt", (1, 2)))
        await rig.publish()
        assert engines[0].cache


@pytest.mark.parametrize("flush_interval", [0, 1])
async def test_publication_does_not_wait_for_the_longest_generation(
    engines: list[StandinEngine], flush_interval: int
) -> None:
    engines[0].faults.step_s = 0.02
    async with Rig(engines, flush_interval=flush_interval) as rig:
        await rig.publish()
        running = rig.generate(max_tokens=1800)  # 36 s
        await is_running(rig)
        started = time.monotonic()
        await rig.publish()
        assert time.monotonic() - started < 3.0
        running.cancel()


async def test_engines_sample_while_a_version_is_prepared(engines: list[StandinEngine]) -> None:
    async with Rig(engines) as rig:
        await rig.publish()
        engines[0].faults.steps["vime_stage_weights"] = "hang"
        publishing = asyncio.create_task(rig.publish())
        assert (await rig.generate(max_tokens=20)).finish_reason == "length"
        del engines[0].faults.steps["vime_stage_weights"]
        assert (await publishing).raised


async def test_weights_that_are_loaded_as_they_arrive_are_published_too(engines: list[StandinEngine]) -> None:
    async with Rig(engines, streams=True) as rig:
        assert [(await rig.publish()).version for _ in range(2)] == [1, 2]
        await rig.check_standing()


async def test_versions_are_loaded_as_they_arrive_once_one_had_no_room(engines: list[StandinEngine]) -> None:
    async with Rig(engines, streams_after_failure=True) as rig:
        await rig.publish()
        rig.trainer.fails_with = PublicationError("The GPU's memory is full.")
        assert not (await rig.publish()).raised
        rig.trainer.fails_with = None
        engines[0].faults.steps["vime_stage_weights"] = "hang"
        assert (await rig.publish()).raised
        await rig.check_standing()


async def test_an_engine_that_dies_while_a_version_is_brought_says_nothing_of_the_others_room(
    engines: list[StandinEngine],
) -> None:
    async with Rig(engines, streams_after_failure=True) as rig:
        await rig.publish()
        engines[1].faults.steps["vime_stage_weights"] = "die"
        await rig.publish()
        assert (await rig.publish()).raised
        engines[0].faults.steps["vime_stage_weights"] = "error"
        assert not (await rig.publish()).raised, "it was still brought beside the model first"


async def test_engine_that_fails_to_load_is_fenced_and_repaired_by_the_next_publication(
    engines: list[StandinEngine],
) -> None:
    async with Rig(engines) as rig:
        await rig.publish()
        engines[1].faults.num_failed_updates = 1
        publication = await rig.publish()
        assert publication.raised
        assert "told to fail" in publication.fenced[engines[1].address]
        assert engines[1].version == "1"
        assert engines[1].is_paused, "an engine whose weights are in doubt serves nothing"
        assert rig.admission.serving == [engines[0].address]
        assert not (await rig.publish()).fenced
        assert len(rig.admission.serving) == 2
        await rig.check_standing()


async def test_publication_that_reaches_no_engine_leaves_all_on_the_old_version_and_running(
    engines: list[StandinEngine],
) -> None:
    async with Rig(engines) as rig:
        await rig.publish()
        rig.trainer.fails_with = PublicationError("The trainer's memory is full.")
        publication = await rig.publish()
        assert (publication.version, publication.raised) == (1, False)
        rig.trainer.fails_with = None
        await rig.check_standing()
        later = await rig.publish()
        assert later.raised
        assert later.version == 3, "a number that was tried is never used for other weights"
        await rig.check_standing()


async def test_too_many_failures_in_a_row_end_the_run_with_the_reasons(engines: list[StandinEngine]) -> None:
    async with Rig(engines) as rig:
        await rig.publish()
        rig.trainer.fails_with = PublicationError("The trainer's memory is full.")
        for _ in range(MAX_FAILED - 1):
            assert not (await rig.publish()).raised
        with pytest.raises(PublicationError, match=r"3 attempts in a row have failed; version 1 is served by http"):
            await rig.publish()


async def test_a_run_without_a_serving_engine_ends_naming_them(engines: list[StandinEngine]) -> None:
    for engine in engines:
        engine.faults.steps["/update_weights"] = "error"
    async with Rig(engines) as rig:
        with pytest.raises(PublicationError, match="served by no engine") as error:
            await rig.publish()
        assert set(error.value.engines) == {engine.address for engine in engines}
        assert "told to fail" in str(error.value)


async def test_all_engines_failing_once_are_published_to_again_at_once(engines: list[StandinEngine]) -> None:
    async with Rig(engines) as rig:
        await rig.publish()
        for engine in engines:
            engine.faults.num_failed_updates = 1
        publication = await rig.publish()
        assert (publication.raised, publication.version, publication.fenced) == (True, 3, {})
        await rig.check_standing()


async def test_first_weights_must_be_those_that_the_engines_were_started_with(engines: list[StandinEngine]) -> None:
    async with Rig(engines, compare_first=True) as rig:
        rig.trainer.num_steps = -1
        with pytest.raises(PublicationError, match=r"--check-weight-update-equal: .* tensors differ") as error:
            await rig.publish()
        assert set(error.value.engines) == {engine.address for engine in engines}
    async with Rig(engines, compare_first=True) as rig:
        rig.trainer.num_steps = -1
        for engine in engines:
            engine.load(Trainer().named_hf_weights())
            engine.version = "default"
        assert (await rig.publish()).raised
        assert (await rig.publish()).raised, "only the first version is compared"


async def test_without_engines_a_publication_only_counts() -> None:
    async with Rig([], start_version=4) as rig:
        publication = await rig.publish()
        assert (publication.version, publication.wire_bytes, rig.publisher.version) == (5, 0, 5)
        assert publication.raised
        assert rig.admission.said == ["resume 5"]


async def test_the_first_version_of_a_trainer_that_was_started_again_builds_on_nothing(
    engines: list[StandinEngine], tmp_path: Path
) -> None:
    async with Rig(engines, folder=tmp_path) as rig:
        await rig.publish()
        await rig.publish()
        rig.publisher.sender_is_new()
        assert (await rig.publish()).version == 3
        await rig.publish()
        assert rig.source.written == [(1, False), (2, False), (3, True), (4, False)]
        await rig.check_standing()


async def test_engines_whose_publication_is_cut_short_get_no_requests_before_the_next_version(
    engines: list[StandinEngine],
) -> None:
    async with Rig(engines) as rig:
        await rig.publish()
        loading = asyncio.Event()

        async def never(*_: object) -> Failures:
            loading.set()
            await asyncio.Event().wait()
            return {}

        load, rig.transport.load = rig.transport.load, never  # type: ignore[method-assign]
        cut_short = asyncio.create_task(rig.publish())
        await asyncio.wait_for(loading.wait(), 20)
        cut_short.cancel()
        await asyncio.gather(cut_short, return_exceptions=True)
        assert rig.admission.serving == []
        assert set(rig.publisher.fenced) == {engine.address for engine in engines}
        rig.transport.load = load  # type: ignore[method-assign]
        assert (await rig.publish()).version == 3
        assert len(rig.admission.serving) == 2
        await rig.check_standing()
