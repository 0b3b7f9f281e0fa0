"""The staleness bound against a simulated stream, and the first publications."""

import random
from dataclasses import dataclass

import pytest

from pipeline.flush import publication_flushes
from pipeline.preview.publications import first_publications
from pipeline.preview.staleness import staleness_bound


@dataclass
class Group:
    version: int
    left: int
    accepted: int | None = None


def oldest_trained(batch: int, max_groups: int, in_flight: int, interval: int, seed: int) -> int:
    """Largest age over 60 rollouts of random length: each tick finishes some groups, leases new ones, or trains."""
    chance, version, position, worst, trained = random.Random(seed), 1, 0, 0, 0
    running: list[Group] = []
    waiting: list[Group] = []
    training: list[Group] = []
    while trained < 60:
        while len(running) < in_flight and len(running) + len(waiting) + len(training) < max_groups:
            running.append(Group(version, chance.choice([1, 2, 3, 30])))
        for group in list(running):
            group.left -= 1
            if group.left <= 0:
                running.remove(group)
                group.accepted, position = position, position + 1
                waiting.append(group)
        if training and chance.random() < 0.6:
            training.clear()
            trained += 1
        elif trained and not training and chance.random() < 0.5 and version <= trained:
            version += 1
            if publication_flushes(version, 0, interval):
                for group in running:
                    group.version = version
        elif not training and version > trained and len(waiting) >= batch:
            waiting.sort(key=lambda group: (group.version, group.accepted))
            training, waiting = waiting[:batch], waiting[batch:]
            worst = max(worst, version - min(group.version for group in training))
    return worst


@pytest.mark.parametrize(("batch", "max_groups", "in_flight"), [(4, 8, 4), (4, 8, 8), (4, 11, 3), (2, 9, 9), (4, 4, 2)])
@pytest.mark.parametrize("interval", [1, 2, 5])
def test_no_simulated_sample_exceeds_the_bound(batch: int, max_groups: int, in_flight: int, interval: int) -> None:
    bound = staleness_bound(batch=batch, max_groups=max_groups, groups_in_flight=in_flight, flush_interval=interval)
    ages = [oldest_trained(batch, max_groups, in_flight, interval, seed) for seed in range(20)]
    assert bound.most is not None
    assert max(ages) <= bound.most


def test_the_bound_is_reached() -> None:
    bound = staleness_bound(batch=4, max_groups=8, groups_in_flight=8, flush_interval=1)
    assert max(oldest_trained(4, 8, 8, 1, seed) for seed in range(60)) == bound.most == 2


def test_requests_that_outlive_publications_have_no_bound() -> None:
    bound = staleness_bound(batch=32, max_groups=64, groups_in_flight=16, flush_interval=0)
    assert (bound.most, bound.waiting, bound.in_flight_mean) == (None, 2, 0.5)


@pytest.mark.parametrize(
    ("interval", "flushed"), [(1, range(1, 11)), (0, [1]), (-3, [1]), (2, [1, 3, 5, 7, 9]), (8, [1, 9])]
)  # fmt: skip
def test_first_ten_versions_follow_the_flush_rule(interval: int, flushed: list[int]) -> None:
    planned = first_publications(
        start_version=0, start_rollout=0, num_rollout=100, flush_interval=interval, publish_every=1
    )
    assert [item.version for item in planned] == list(range(1, 11))
    assert [item.after_rollout for item in planned[:3]] == [None, 0, 1]
    assert [item.version for item in planned if item.flushes] == list(flushed)


def test_a_resumed_session_goes_on_counting_and_the_last_rollout_publishes_nothing() -> None:
    planned = first_publications(start_version=5, start_rollout=5, num_rollout=8, flush_interval=2, publish_every=1)
    assert [(item.version, item.after_rollout, item.flushes) for item in planned] == [
        (6, None, True), (7, 5, True), (8, 6, False),
    ]  # fmt: skip
