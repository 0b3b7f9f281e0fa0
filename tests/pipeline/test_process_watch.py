"""The end of a process ends the work; a failure is never taken for the end of the data."""

import asyncio
from pathlib import Path

import pytest

from pipeline.process_watch import ProcessWatch
from vime.cli.exit_codes import ExitCode, exit_code
from vime.errors import ProcessDiedError, RunFailedError, StalledError, TrainerDiedError


@pytest.fixture
def watch(tmp_path: Path) -> ProcessWatch:
    return ProcessWatch(lambda name: tmp_path / f"{name}.log")


async def failing(error: Exception) -> None:
    raise error


async def test_a_producer_that_raises_ends_the_work_with_its_cause_and_a_status_of_its_own(
    watch: ProcessWatch, tmp_path: Path
) -> None:
    (tmp_path / "producer_0.log").write_text("line before\nZeroDivisionError: by a rollout function\n")
    watch.add("producer_0", failing(RunFailedError("--rollout-function-path: it raised ZeroDivisionError")))
    with pytest.raises(RunFailedError, match="it raised ZeroDivisionError") as caught:
        await watch.guarded(asyncio.sleep(60))
    assert caught.value.message.rstrip().endswith("| ZeroDivisionError: by a rollout function")
    assert exit_code(caught.value) is ExitCode.INTERNAL
    await watch.close()


async def test_a_producer_that_returns_while_groups_are_waited_for_has_failed(watch: ProcessWatch) -> None:
    watch.add("producer_0", asyncio.sleep(0))
    with pytest.raises(RunFailedError, match="producer_0 ended unexpectedly"):
        await watch.guarded(asyncio.sleep(60))
    await watch.close()


async def test_a_rank_that_died_is_told_as_such_and_can_be_forgotten(watch: ProcessWatch) -> None:
    watch.add("trainer_0", failing(ProcessDiedError("killed")), TrainerDiedError)
    with pytest.raises(TrainerDiedError, match=r"trainer_0 ended unexpectedly \(killed\)"):
        await watch.guarded(asyncio.sleep(60))
    assert len(watch.forget("trainer_")) == 1
    assert await watch.guarded(asyncio.sleep(0, "done")) == "done"
    await watch.close()


async def test_a_stall_comes_out_as_it_is_with_exit_status_5(watch: ProcessWatch) -> None:
    watch.add("supervisor", failing(StalledError("Nothing has gone on for 9 s: step 1 waits for 8 groups")))
    with pytest.raises(StalledError, match="^Nothing has gone on for 9 s: step 1 waits for 8 groups$") as caught:
        await watch.guarded(asyncio.sleep(60))
    assert exit_code(caught.value) is ExitCode.STALLED
    await watch.close()
