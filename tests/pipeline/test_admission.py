"""How many groups may be on their way, and how old they can become."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.admission import AdmissionRules, most_untrained


def test_without_a_bound_only_the_limit_counts() -> None:
    rules = AdmissionRules(max_groups=7, batch=4, max_staleness=None)
    assert most_untrained(rules, oldest_version=1, begun_version=1, next_version=100) == 7


def test_staleness_zero_allows_one_batch_at_a_time() -> None:
    rules = AdmissionRules(max_groups=100, batch=4, max_staleness=0)
    assert most_untrained(rules, oldest_version=3, begun_version=3, next_version=3) == 4


def test_groups_older_than_the_bound_don_t_stop_the_run() -> None:
    rules = AdmissionRules(max_groups=100, batch=4, max_staleness=1)
    assert most_untrained(rules, oldest_version=3, begun_version=50, next_version=50) == 4


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
    slowness=st.sampled_from([0.0, 0.5, 0.95]),
)
def test_no_group_is_trained_older_than_the_bound_whatever_the_speeds(
    seed: int, batch: int, max_staleness: int, slowness: float
) -> None:
    """A stream of groups that finish in any order; the trainer takes the oldest versions first."""
    random_ = random.Random(seed)
    rules = AdmissionRules(max_groups=1000, batch=batch, max_staleness=max_staleness)
    version, next_version, trained = 1, 1, 0
    in_flight: list[int] = []
    waiting: list[int] = []
    for _ in range(400):
        action = random_.random()
        oldest = min([version, *in_flight, *waiting])
        allowed = most_untrained(rules, oldest_version=oldest, begun_version=version, next_version=next_version)
        room = allowed - len(in_flight) - len(waiting)
        if action < 0.4 and room > 0:
            in_flight += [version] * random_.randint(1, room)
        elif action < 0.8 and in_flight:
            newest_first = random_.random() < slowness
            waiting.append(in_flight.pop(-1 if newest_first else 0))
        elif action < 0.9 and len(waiting) >= batch and version == next_version:
            waiting.sort()
            chosen, waiting = waiting[:batch], waiting[batch:]
            assert version - min(chosen) <= max_staleness
            trained += batch
            next_version = version + 1
        elif version < next_version:
            version = next_version
    assert trained > 0


def test_no_group_is_begun_that_would_be_too_old_itself() -> None:
    rules = AdmissionRules(max_groups=8, batch=4, max_staleness=0)
    assert most_untrained(rules, oldest_version=2, begun_version=2, next_version=3) == 0


@given(versions=st.lists(st.integers(0, 5), min_size=2, max_size=2), max_staleness=st.integers(0, 3))
def test_a_batch_can_always_be_made_once_weights_are_published(versions: list[int], max_staleness: int) -> None:
    oldest, current = sorted(versions)
    rules = AdmissionRules(max_groups=8, batch=4, max_staleness=max_staleness)
    assert most_untrained(rules, oldest_version=oldest, begun_version=current, next_version=current) >= 4
