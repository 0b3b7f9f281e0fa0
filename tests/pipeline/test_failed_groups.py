"""Letters of failed groups."""

from pathlib import Path

from pipeline.failed_groups import FailedGroups, Failure, most_telling
from pipeline.messages import Work
from storage.dead_letters import DeadLetterBox, read_letters
from tests.storage.queue_helpers import new_queue, samples_of
from vime.errors import EngineError, RewardError


async def test_without_a_pool_that_outlives_the_run_letters_hold_the_samples(tmp_path: Path) -> None:
    pool, queue = new_queue(tmp_path / "pool", 1)
    with pool, queue:
        (leased,) = queue.lease("worker", 1)
    failed = FailedGroups(DeadLetterBox(tmp_path / "letters", "worker"), None, max_attempts=1)
    error = RewardError("the reward is None", reason="reward_none")
    await failed.record(Work(leased.lease, 0, leased.prompt_ref), [Failure(samples_of(0), error)])
    ((letter,), _) = read_letters(tmp_path / "letters")
    assert letter.payload_ref is None
    assert letter.samples is not None
    assert [sample["tokens"] for sample in letter.samples] == [sample.tokens for sample in samples_of(0)]
    assert (letter.group_index, letter.attempt, letter.sample_indices) == (0, 1, [0, 1])
    assert failed.num_samples_by_reason == {"reward_none": 2}


async def test_an_engines_failure_gets_a_letter_when_its_group_is_given_up_and_not_before(tmp_path: Path) -> None:
    pool, queue = new_queue(tmp_path / "pool", 1)
    with pool, queue:
        (leased,) = queue.lease("worker", 1)
    failed = FailedGroups(DeadLetterBox(tmp_path / "letters", "worker"), None, max_attempts=2)
    work, failures = Work(leased.lease, 0, leased.prompt_ref), [Failure(samples_of(0)[:1], EngineError("gone"))]
    assert not await failed.attempt_failed(work, failures)
    assert failed.num_samples_by_reason == {}
    assert await failed.attempt_failed(work, failures)
    assert [letter.reason for letter in read_letters(tmp_path / "letters")[0]] == ["engine"]
    failed.finished(0)
    assert not await failed.attempt_failed(work, failures)


async def test_segments_of_one_rollout_that_fail_get_a_letter_each(tmp_path: Path) -> None:
    pool, queue = new_queue(tmp_path / "pool", 1)
    with pool, queue:
        (leased,) = queue.lease("worker", 1)
        failed = FailedGroups(DeadLetterBox(tmp_path / "letters", "worker"), pool, max_attempts=1)
        segments = samples_of(0)
        segments[1].index, segments[1].tokens = segments[0].index, segments[0].tokens[::-1]
        failures = [Failure([segment], RewardError("the reward is None")) for segment in segments]
        await failed.record(Work(leased.lease, 0, leased.prompt_ref), failures)
        letters, _ = read_letters(tmp_path / "letters")
        kept = [pool.read_columns(letter.payload_ref, ["tokens"])["tokens"] for letter in letters if letter.payload_ref]
    assert [tokens.tolist() for tokens in kept] == [segment.tokens for segment in segments]


async def test_a_group_that_was_given_up_is_forgotten(tmp_path: Path) -> None:
    pool, queue = new_queue(tmp_path / "pool", 1)
    with pool, queue:
        (leased,) = queue.lease("worker", 1)
    failed = FailedGroups(DeadLetterBox(tmp_path / "letters", "worker"), None, max_attempts=2)
    work, failures = Work(leased.lease, 0, leased.prompt_ref), [Failure(samples_of(0), RewardError("no reward"))]
    assert [await failed.attempt_failed(work, failures) for _ in range(4)] == [False, True, False, True]


def test_a_group_is_dropped_for_what_its_sample_did_rather_than_for_its_engine() -> None:
    engine, reward = Failure([], EngineError("gone")), Failure([], RewardError("raised"))
    assert most_telling([engine, reward]) is reward
    assert most_telling([engine]) is engine
