"""What a summary sums up over the samples of a group, against numbers computed by hand."""

from __future__ import annotations

import msgspec
import numpy as np

from storage.sample_sums import SampleSums, sample_sums, total
from storage.summary import GroupSummary, summarize
from vime.utils.types import Sample


def members() -> list[Sample]:
    """The first keeps 3 and 1 tokens at two sampled positions, with one of a tool between; the second records none."""
    return [
        Sample(
            group_index=0,
            index=0,
            response="again " * 200,
            reward=1.0,
            rollout_top_p_token_ids=np.asarray([5, 6, 7, 5], np.int32),
            rollout_top_p_token_offsets=np.asarray([0, 3, 3, 4], np.int32),
            spec_info=Sample.SpecInfo(5, 8, 3, 9),
            prefix_cache_info=Sample.PrefixCacheInfo(16, 20),
            non_generation_time=0.25,
        ),
        Sample(group_index=0, index=1, response="once", reward=0.0, prefix_cache_info=Sample.PrefixCacheInfo(4, 20)),
    ]


def test_tokens_of_samples_without_a_verification_step_are_not_among_those_of_the_steps() -> None:
    undrafted = Sample(group_index=0, index=0, response="once", reward=0.0, spec_info=Sample.SpecInfo(0, 0, 0, 7))
    assert sample_sums([undrafted, members()[0]]).num_verified_tokens == 9


def test_sums_are_over_all_members() -> None:
    assert sample_sums(members()) == SampleSums(
        num_repetitive=1,
        num_cached_tokens=20,
        num_kept_tokens=4,
        num_kept_positions=2,
        num_drafted_tokens=8,
        num_accepted_tokens=5,
        num_verify_steps=3,
        num_verified_tokens=9,
    )


def test_sums_add_up_field_by_field() -> None:
    assert total([SampleSums(1, 2, 3, 4, 5, 6, 7, 8), SampleSums(10, 20), SampleSums()]) == SampleSums(
        11, 22, 3, 4, 5, 6, 7, 8
    )
    assert total([]) == SampleSums()


def test_a_summary_has_the_sums_and_the_seconds_outside_the_engine() -> None:
    summary = summarize(members())
    assert summary.sums == sample_sums(members())
    assert summary.non_generation_s == [0.25, 0.0]
    assert summarize(members()[1:]).non_generation_s == []


def test_a_summary_from_before_there_were_sums_is_read() -> None:
    fields = msgspec.to_builtins(summarize(members()))
    del fields["sums"], fields["non_generation_s"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=GroupSummary).sums == SampleSums()
