"""Appending keeps every per-token field equally long, and refuses what would leave a hole in one."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from vime.errors import SampleError
from vime.utils.types import Sample


@dataclass
class Args:
    """The settings that appending reads."""

    use_score_centering: bool = False
    score_centering_top_k: int = 2
    rollout_top_p: float = 1.0


TOP_K = Args(use_score_centering=True)
TOP_P = Args(use_score_centering=True, rollout_top_p=0.9)


def fresh() -> Sample:
    return Sample(group_index=1, index=2, tokens=[1, 2, 3])


def top_k(count: int, width: int = 2) -> dict[str, Any]:
    ids = np.arange(count * width).reshape(count, width)
    return {"score_centering_topk": (ids, np.full((count, width), -1.0))}


def top_p(*counts: int) -> dict[str, Any]:
    total = sum(counts)
    return {"score_centering_top_p": (list(range(total)), np.cumsum([0, *counts]), [-1.0] * total)}


def test_turns_of_engine_and_tool_leave_fields_of_equal_length() -> None:
    sample = fresh()
    sample.append_response_tokens(
        Args(),
        [10, 11],
        [-0.5, -0.25],
        meta_info={"weight_version": "3", "finish_reason": {"type": "stop"}, "cached_tokens": 1, "prompt_tokens": 3},
        text="ab",
    )
    sample.append_response_tokens(Args(), [20, 21, 22], trainable=False, text="tool", update_terminal_info=False)
    sample.append_response_tokens(
        Args(),
        [12],
        [-1.0],
        meta_info={"weight_version": "4", "finish_reason": {"type": "length"}, "cached_tokens": 8, "prompt_tokens": 8},
        text="c",
    )
    assert sample.tokens == [1, 2, 3, 10, 11, 20, 21, 22, 12]
    assert (sample.response, sample.response_length, sample.prompt_length) == ("abtoolc", 6, 3)
    assert sample.loss_mask == [1, 1, 0, 0, 0, 1]
    assert sample.rollout_log_probs == [-0.5, -0.25, 0.0, 0.0, 0.0, -1.0]
    assert sample.version_spans == [(3, 0, 2), (4, 5, 6)]
    assert sample.weight_versions == ["3", "4"]
    assert sample.status is Sample.Status.TRUNCATED
    assert sample.prefix_cache_info == Sample.PrefixCacheInfo(9, 11)


def test_parts_of_one_version_that_follow_each_other_are_one_span() -> None:
    sample = fresh()
    for _ in range(2):
        sample.append_response_tokens(Args(), [5, 6], [-1.0, -1.0], meta_info={"weight_version": "3"})
    assert sample.version_spans == [(3, 0, 4)]
    assert sample.weight_versions == ["3", "3"]


def test_tokens_before_that_have_no_mask_count_as_trainable() -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=2, rollout_log_probs=[-1.0, -1.0])
    sample.append_response_tokens(Args(), [5], trainable=False)
    assert sample.loss_mask == [1, 1, 0]


def test_parts_of_one_version_around_a_tool_are_two_spans() -> None:
    sample = fresh()
    sample.append_response_tokens(Args(), [5], [-1.0], meta_info={"weight_version": "3"})
    sample.append_response_tokens(Args(), [20, 21], trainable=False)
    sample.append_response_tokens(Args(), [6], [-1.0], meta_info={"weight_version": "3"})
    assert sample.version_spans == [(3, 0, 1), (3, 3, 4)]


def test_spans_of_one_answer_are_moved_behind_the_tokens_before() -> None:
    sample = fresh()
    sample.append_response_tokens(Args(), [5], [-1.0], meta_info={"weight_version": "3"})
    spans = [(3, 0, 1), (4, 1, 2)]
    sample.append_response_tokens(
        Args(), [6, 7], [-1.0, -1.0], meta_info={"weight_version": "4", "version_spans": spans}
    )
    assert sample.version_spans == [(3, 0, 2), (4, 2, 3)]


def test_an_aborted_answer_without_tokens_changes_the_status_alone() -> None:
    sample = fresh()
    meta = {"weight_version": "3", "finish_reason": {"type": "abort"}}
    sample.append_response_tokens(TOP_K, [], meta_info=meta)
    assert (sample.status, sample.response_length, sample.weight_versions) == (Sample.Status.ABORTED, 0, [])
    assert sample.rollout_topk_token_ids is None or len(sample.rollout_topk_token_ids) == 0


def test_a_version_that_is_no_number_gets_no_span() -> None:
    sample = fresh()
    sample.append_response_tokens(Args(), [5], [-1.0], meta_info={"weight_version": "default"})
    assert (sample.version_spans, sample.weight_versions) == ([], ["default"])


def test_tool_tokens_get_candidates_that_count_for_nothing() -> None:
    sample = fresh()
    sample.append_response_tokens(TOP_K, [20], trainable=False)
    sample.append_response_tokens(TOP_K, [10, 11], [-0.5, -0.5], meta_info=top_k(2))
    sample.append_response_tokens(TOP_K, [21], trainable=False)
    ids, log_probs = sample.rollout_topk_token_ids, sample.rollout_topk_log_probs
    assert ids is not None
    assert log_probs is not None
    assert ids.tolist() == [[0, 1], [0, 1], [2, 3], [0, 1]]
    assert log_probs[:, 0].tolist() == pytest.approx([-math.log(2), -1.0, -1.0, -math.log(2)])
    assert (ids.dtype, log_probs.dtype) == (np.int32, np.float32)


def test_tool_tokens_have_no_entries_under_top_p() -> None:
    sample = fresh()
    sample.append_response_tokens(TOP_P, [10, 11], [-0.5, -0.5], meta_info=top_p(3, 1))
    sample.append_response_tokens(TOP_P, [20], trainable=False)
    sample.append_response_tokens(TOP_P, [12], [-0.5], meta_info=top_p(2))
    assert sample.rollout_topk_token_ids is None
    offsets, ids = sample.rollout_top_p_token_offsets, sample.rollout_top_p_token_ids
    assert offsets is not None
    assert ids is not None
    assert offsets.tolist() == [0, 3, 4, 4, 6]
    assert ids.tolist() == [0, 1, 2, 3, 0, 1]


def begun(args: Args, meta: dict[str, Any]) -> Sample:
    sample = fresh()
    sample.append_response_tokens(args, [10], [-0.5], meta_info=meta)
    return sample


ROUTES = {"routed_experts": np.ones((3, 2, 1), np.uint8)}


@pytest.mark.parametrize(
    ("sample", "args", "call", "reason"),
    [
        (fresh(), Args(), {"tokens": [5, 6], "log_probs": [-1.0]}, "log_probs_length"),
        (fresh(), Args(), {"tokens": [5]}, "log_probs_length"),
        (fresh(), Args(), {"tokens": [5], "log_probs": [-1.0], "trainable": False}, "log_probs_length"),
        (
            Sample(tokens=[1, 2], response_length=1),
            Args(),
            {"tokens": [5], "log_probs": [-1.0]},
            "log_probs_missing",
        ),
        (
            Sample(tokens=[1, 2], response_length=1, loss_mask=[1, 1]),
            Args(),
            {"tokens": [5], "trainable": False},
            "lengths",
        ),
        (fresh(), TOP_K, {"tokens": [5], "log_probs": [-1.0]}, "sc_missing"),
        (fresh(), TOP_P, {"tokens": [5], "log_probs": [-1.0]}, "sc_missing"),
        (begun(Args(), {}), TOP_K, {"tokens": [5], "log_probs": [-1.0], "meta_info": top_k(1)}, "sc_missing"),
        (begun(TOP_K, top_k(1)), Args(), {"tokens": [5], "log_probs": [-1.0]}, "sc_missing"),
        (fresh(), TOP_K, {"tokens": [5, 6], "log_probs": [-1.0, -1.0], "meta_info": top_k(1)}, "sc_rows"),
        (begun(TOP_K, top_k(1)), TOP_K, {"tokens": [5], "log_probs": [-1.0], "meta_info": top_k(1, 3)}, "sc_rows"),
        (
            fresh(),
            TOP_K,
            {"tokens": [5], "log_probs": [-1.0], "meta_info": {"score_centering_topk": ([4], [-1.0])}},
            "sc_rows",
        ),
        (fresh(), TOP_P, {"tokens": [5, 6], "log_probs": [-1.0, -1.0], "meta_info": top_p(2)}, "top_p_offsets"),
        (
            fresh(),
            TOP_K,
            {"tokens": [5], "log_probs": [-1.0], "meta_info": {"score_centering_topk": ([[2**40]], [[-1.0]])}},
            "sc_id_range",
        ),
        (fresh(), Args(), {"tokens": [5, 6], "log_probs": [-1.0] * 2, "meta_info": ROUTES}, "routes_rows"),
        (
            fresh(),
            Args(),
            {"tokens": [5], "log_probs": [-1.0], "meta_info": {"finish_reason": {"type": "bored"}}},
            "status",
        ),
    ],
)
def test_what_would_leave_a_hole_is_refused_and_the_sample_stays_as_it_was(
    sample: Sample, args: Args, call: dict[str, Any], reason: str
) -> None:
    before = copy.deepcopy(sample)
    with pytest.raises(SampleError) as caught:
        sample.append_response_tokens(args, **call)
    assert caught.value.reason == reason
    assert sample == before


def test_routes_from_a_row_on_replace_those_that_are_there() -> None:
    sample = fresh()
    rows = np.arange(12, dtype=np.uint8).reshape(6, 2, 1)
    sample.append_response_tokens(Args(), [5], [-1.0], meta_info={"routed_experts": rows[:3]})
    again = {"routed_experts": rows[2:5] + 100, "routed_experts_prompt_start": 2}
    sample.append_response_tokens(Args(), [6, 7], [-1.0, -1.0], meta_info=again)
    assert np.asarray(sample.rollout_routed_experts)[:, 0, 0].tolist() == [0, 2, 104, 106, 108]


def test_settings_of_the_command_line_are_enough() -> None:
    from vime.settings.parse import HookArgs, parse_settings

    sample = fresh()
    sample.append_response_tokens(HookArgs(parse_settings([])), [5], [-1.0])
    assert sample.rollout_topk_token_ids is None
