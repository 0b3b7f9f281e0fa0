"""Generation that fails for some prompts, whoever makes the groups: the run goes on, or ends with a summary."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.batch_wait import wait_for_batch
from pipeline.failed_fraction import check_failed_fraction
from pipeline.messages import QueueCounts
from storage.dead_letters import letters_folder, read_letters
from tests.pipeline.stream_parts import CharTokenizer, stream
from tests.pipeline.test_batch_wait import PartsSource
from tests.pipeline.test_rollout_runner import SYNC, args_of
from tests.support.standin_engine import StandinEngine
from vime.errors import TooManyFailuresError

pytestmark = pytest.mark.usefixtures("quick_retries")

FEW_BUSY = {"n_samples_per_prompt": 1, "num_prompts": 100}


def prompt_of(number: int) -> tuple[int, ...]:
    return tuple(CharTokenizer().encode(f"prompt {number}", add_special_tokens=False))


@pytest.mark.parametrize(
    "rollout_args", [None, args_of(SYNC, rollout_batch_size=33)], ids=["stream", "rollout function"]
)
async def test_one_generation_in_a_hundred_that_always_fails_is_set_aside_with_a_letter_and_the_run_goes_on(
    tmp_path: Path, engine: StandinEngine, rollout_args: SimpleNamespace | None
) -> None:
    engine.faults.failing_prompts = {prompt_of(37)}
    async with stream(
        tmp_path, engine, groups_wanted=99, max_groups=200, rollout_args=rollout_args, **FEW_BUSY
    ) as parts:
        await parts.until_pending(99, timeout_s=60)
        counts = parts.coordinator.counts()
        assert parts.coordinator.identity().holds
    assert counts.dropped == {"engine": 1}
    check_failed_fraction(counts.dropped, counts.generated, allowed=0.0, run=tmp_path)
    ((letter,), _) = read_letters(letters_folder(tmp_path))
    assert (letter.group_index, letter.reason, letter.sample_indices) == (37, "engine", [37])
    assert "answered 500" in letter.message


async def test_a_run_most_of_whose_generations_fail_stops_with_a_summary(tmp_path: Path, engine: StandinEngine) -> None:
    engine.faults.failing_prompts = {prompt_of(number) for number in range(100) if number % 5 >= 2}

    def check(counts: QueueCounts) -> None:
        check_failed_fraction(counts.dropped, counts.generated, allowed=0.1, run=tmp_path)

    async with stream(tmp_path, engine, max_groups=200, **FEW_BUSY) as parts:
        source = PartsSource(parts)
        wait = functools.partial(wait_for_batch, source, source.stats, 100, stall_timeout_s=60.0, interval_s=0.05)
        with pytest.raises(
            TooManyFailuresError, match=r"^\d+ of \d+ groups were set aside, .* reasons: engine \(\d+\)"
        ):
            await wait(report=lambda _: None, check=check, stop_asked=lambda: False)
