"""What a summary says of a group for reports: raw rewards and the prompt's source."""

from __future__ import annotations

import math
from typing import Any

import pytest

from storage.summary import source_name, summarize
from vime.utils.types import Sample


def member(index: int, **fields: Any) -> Sample:
    return Sample(group_index=0, index=index, **{"reward": 1.0, **fields})


@pytest.mark.parametrize(
    ("raw", "reported"),
    [
        ([None, None], []),
        ([5, None], [5.0, 1.0]),
        ([5.5, 0], [5.5, 0.0]),
        (["5", math.nan], []),
    ],
)
def test_raw_rewards_stand_in_for_rewards_where_there_are_any(raw: list[Any], reported: list[float]) -> None:
    samples = [
        member(index, metadata={} if value is None else {"raw_reward": value}) for index, value in enumerate(raw)
    ]
    summary = summarize(samples)
    assert (summary.reported_rewards, summary.rewards) == (reported, [1.0, 1.0])


def test_the_source_is_what_code_set_or_the_record_said() -> None:
    of_record = member(0, metadata={"source_name": "gsm8k"})
    assert source_name(of_record) == "gsm8k"
    vars(of_record)["source"] = "own"
    assert source_name(of_record) == "own"
    assert source_name(member(0)) == "unknown"
    assert summarize([of_record, member(1)]).source_names == ["own", "unknown"]
    assert summarize([member(0), member(1)]).source_names == []
