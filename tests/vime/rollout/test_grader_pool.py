"""Graders in processes: what hangs, eats memory or dies is replaced, and only its own sample fails."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.vime.rollout import rewards_in_process
from vime.errors import RewardError
from vime.rollout.rewards import Rewards, score, score_group
from vime.settings.parse import parse_settings
from vime.utils.types import Sample

pytestmark = pytest.mark.multiproc
MODULE = rewards_in_process.__name__


def rewards(function: str, *words: str) -> Rewards:
    more = ["--reward-workers", "1", "--reward-memory-gib", "1", *words]
    return Rewards(parse_settings(["--custom-rm-path", f"{MODULE}.{function}", *more]))


async def scored(of_run: Rewards, label: str = "") -> Sample:
    sample = Sample(group_index=0, index=0, response="four", label=label, metadata={"from": "file"})
    await score(of_run.of_sample, None, sample, timeout_s=0, key=None)
    return sample


async def test_each_kind_of_failing_process_has_its_reason_and_the_next_sample_is_graded() -> None:
    expected = {
        "hang": ("reward_timeout", "longer than 0.5 s"),
        "eat": ("reward_memory", "more than 1 GiB of memory"),
        "die": ("reward_process_died", "ended with exit status 3"),
        "raise": ("reward_raised", "raised KeyError: 'no such thing'"),
    }
    async with rewards("by_label", "--reward-timeout", "0.5") as of_run:
        for label, (reason, words) in expected.items():
            with pytest.raises(RewardError, match=f"sample 0 of group 0: .*{words}") as caught:
                await scored(of_run, label)
            assert caught.value.reason == reason
            assert (await scored(of_run)).reward == 1.0


async def test_the_processes_that_grade_can_be_started_before_a_sample_comes() -> None:
    before = set(psutil.Process().children(recursive=True))
    async with rewards("by_label") as of_run:
        of_run.start()
        deadline = time.monotonic() + 30
        while not set(psutil.Process().children(recursive=True)) - before:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


async def test_a_coroutine_has_no_processes_started_for_it() -> None:
    before = set(psutil.Process().children(recursive=True))
    async with rewards("waits") as of_run:
        of_run.start()
        assert (await scored(of_run)).reward == 1.0
        assert set(psutil.Process().children(recursive=True)) == before


async def test_the_deadline_of_a_grading_begins_when_it_does() -> None:
    async with rewards("by_label", "--reward-timeout", "0.5") as of_run:
        await scored(of_run)  # the process is up
        outcomes = await asyncio.gather(
            *(scored(of_run, label) for label in ["hang", "hang", "hang", ""]), return_exceptions=True
        )
    assert [getattr(outcome, "reason", "graded") for outcome in outcomes] == ["reward_timeout"] * 3 + ["graded"]


async def test_a_cancelled_grading_frees_its_process_at_once() -> None:
    async with rewards("by_label", "--reward-timeout", "600") as of_run:
        await scored(of_run)
        hanging = asyncio.create_task(scored(of_run, "hang"))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(scored(of_run))
        hanging.cancel()
        assert (await asyncio.wait_for(waiting, 30)).reward == 1.0


async def test_a_plain_function_runs_elsewhere_with_the_settings_and_its_metadata_comes_back() -> None:
    async with rewards("annotates", "--rollout-temperature", "0.5") as of_run:
        sample = await scored(of_run)
    assert sample.reward == 0.5
    assert sample.metadata.pop("process") != os.getpid()
    assert sample.metadata == {"from": "file"}


async def test_what_is_no_number_is_refused_as_from_any_reward() -> None:
    async with rewards("returns_odd_thing") as of_run:
        with pytest.raises(RewardError, match="allowed: a finite number") as caught:
            await scored(of_run)
    assert caught.value.reason == "reward_not_a_number"


async def test_a_plain_group_function_gets_the_whole_group() -> None:
    group = [Sample(group_index=0, index=index, response="x" * index) for index in range(3)]
    async with rewards("by_length", "--group-rm") as of_run:
        await score_group(of_run.of_group, None, group, timeout_s=0)
    assert [sample.reward for sample in group] == [0.0, 1.0, 2.0]


async def test_a_sample_that_cannot_be_sent_says_so() -> None:
    async with rewards("by_label") as of_run:
        with pytest.raises(RewardError, match="can't be sent") as caught:
            await score(of_run.of_sample, None, Sample(label=object()), timeout_s=0, key=None)
    assert caught.value.reason == "reward_unsendable"


def test_no_grading_process_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio\n"
        "from tests.vime.rollout.test_grader_pool import rewards, scored\n"
        "async def main():\n"
        "    of_run = rewards('by_label')\n"
        "    await scored(of_run)\n"
        "    task = asyncio.create_task(scored(of_run, 'hang'))\n"
        "    await asyncio.sleep(0.3)\n"
        "    print('hanging', flush=True)\n"
        "    await task\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    root = Path(__file__).parents[3]
    with psutil.Popen(
        [sys.executable, str(script)], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, stdout=-1
    ) as parent:
        assert parent.stdout.readline() == b"hanging\n"
        family = parent.children(recursive=True)
        assert len(family) >= 2
        parent.kill()
        deadline = time.monotonic() + 15
        while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family):
            assert time.monotonic() < deadline, family
            time.sleep(0.05)
