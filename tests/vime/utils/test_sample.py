"""The sample as a record: attributes of the user's own, dicts, equality, what is trained of it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from vime.utils.equality import same_value
from vime.utils.types import Sample


def full() -> Sample:
    sample = Sample(
        index=3,
        tokens=[1, 2, 3],
        response_length=2,
        status=Sample.Status.TRUNCATED,
        rollout_topk_token_ids=np.array([[1, 2], [3, 4]], np.int32),
        metadata={"arrays": [np.arange(3)], "pair": (1, 2)},
        spec_info=Sample.SpecInfo(3, 4, 2, 6),
        prefix_cache_info=Sample.PrefixCacheInfo(1, 4),
    )
    vars(sample)["source"] = "quiz"
    vars(sample)["own_scores"] = {"a": np.float32(0.5)}
    return sample


def test_attributes_of_the_users_own_survive_a_dict_and_back() -> None:
    as_dict = full().to_dict()
    assert (as_dict["status"], as_dict["source"]) == ("truncated", "quiz")
    assert as_dict["spec_info"]["spec_draft_token_num"] == 4
    assert Sample.from_dict(as_dict) == full()


def test_what_a_dict_lacks_gets_its_default() -> None:
    assert Sample.from_dict({"index": 4}) == Sample(index=4)


@pytest.mark.parametrize(
    ("values", "error"), [({"status": "asleep"}, ValueError), ({"spec_info": {"speed": 1}}, TypeError)]
)
def test_a_dict_with_an_unknown_status_or_counter_is_refused(values: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Sample.from_dict(values)


@pytest.mark.parametrize(
    "change",
    [
        {"source": "exam"},
        {"extra": 1},
        {"rollout_topk_token_ids": np.array([[1, 2], [3, 5]], np.int32)},
        {"rollout_topk_token_ids": np.array([[1, 2], [3, 4]], np.int64)},
        {"rollout_topk_token_ids": [[1, 2], [3, 4]]},
        {"metadata": {"arrays": [np.arange(3)], "pair": [1, 2]}},
        {"metadata": {"arrays": [np.arange(3)]}},
        {"spec_info": Sample.SpecInfo(3, 4, 2, 7)},
    ],
)
def test_samples_with_other_values_are_not_equal(change: dict[str, Any]) -> None:
    other = copy.deepcopy(full())
    assert other == full()
    vars(other).update(change)
    assert other != full()
    assert full() != "a sample"


def test_tensors_are_compared_element_by_element() -> None:
    assert same_value({"x": torch.ones(2)}, {"x": torch.ones(2)})
    assert not same_value({"x": torch.ones(2)}, {"x": torch.tensor([1.0, 2.0])})
    assert not same_value({"x": torch.ones(2)}, {"x": torch.ones(3)})


def test_ratios_of_counters_that_are_zero_are_zero() -> None:
    sample = full()
    assert (sample.spec_info.accept_rate, sample.spec_info.accept_length) == (0.75, 3.0)
    assert sample.prefix_cache_info.prefix_cache_hit_rate == 0.25
    empty = Sample()
    assert (empty.spec_info.accept_rate, empty.spec_info.accept_length) == (0.0, 0.0)
    assert empty.prefix_cache_info.prefix_cache_hit_rate == 0.0


def test_nothing_of_a_removed_sample_is_trained_though_its_mask_stays() -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[1, 0], remove_sample=True)
    assert sample.mask_array().tolist() == [0, 0]
    assert sample.effective_response_length == 1
    sample.remove_sample = False
    assert sample.mask_array().tolist() == [1, 0]
