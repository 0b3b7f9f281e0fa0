"""Shares of the stretch since the batch before, from totals that only rise."""

from __future__ import annotations

import pytest

from pipeline.messages import ProducerStats
from pipeline.publication import Publication
from pipeline.stream_shares import StreamShares


def stats(cached: int = 0, prompt: int = 0, reward_s: float = 0.0, generating_s: float = 0.0) -> ProducerStats:
    return ProducerStats(
        0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 1.0,
        cached_prompt_tokens=cached, prompt_tokens=prompt, reward_s=reward_s, generating_s=generating_s,
    )  # fmt: skip


def publication(*, flushed: bool, raised: bool = True) -> Publication:
    return Publication(1, raised, flushed, wire_bytes=0, density=0.0, prepare_s=0.0, pause_s=0.0, fenced={})


def test_time_in_the_reward_is_that_since_the_batch_before() -> None:
    shares = StreamShares()
    shares.update([stats(reward_s=30.0, generating_s=10.0)], None)
    assert shares.reward_time == 0.75
    shares.update([stats(reward_s=31.0, generating_s=13.0)], None)
    assert shares.reward_time == 0.25
    shares.update([stats(reward_s=31.0, generating_s=13.0)], None)
    assert shares.reward_time == 0.0, "nothing went on"


@pytest.mark.parametrize(
    ("salts", "flushed", "share"), [(False, False, 0.5), (False, True, 0.0), (True, False, 0.0), (True, True, 0.0)]
)
def test_prefixes_may_be_stale_where_neither_a_salt_nor_a_flush_keeps_versions_apart(
    salts: bool, flushed: bool, share: float
) -> None:
    shares = StreamShares(salts_prefixes=salts)
    shares.update([stats(cached=90, prompt=100)], publication(flushed=flushed))
    assert shares.stale_prefix == 0.0, "so far all was computed by one version"
    shares.update([stats(cached=100, prompt=120)], publication(flushed=True))
    assert shares.stale_prefix == share
    shares.update([stats(cached=150, prompt=180)], None)
    assert shares.stale_prefix == 0.0, "the last publication emptied the caches"


def test_a_version_that_was_not_raised_makes_no_prefix_stale() -> None:
    shares = StreamShares(salts_prefixes=False)
    shares.update([stats()], publication(flushed=False, raised=False))
    shares.update([stats(cached=1, prompt=2)], None)
    assert shares.stale_prefix == 0.0


def test_a_producer_that_was_replaced_and_counts_from_zero_gives_no_negative_share() -> None:
    shares = StreamShares()
    shares.update([stats(reward_s=30.0, generating_s=10.0)], None)
    shares.update([stats(reward_s=1.0, generating_s=12.0)], None)
    assert shares.reward_time == 0.0
