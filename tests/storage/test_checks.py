"""Samples that training could not use are refused before the queue takes them, each for its own reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from storage.checks import EnqueueRequirements, check_enqueue
from storage.columns import encode_group
from storage.route_checks import CHUNK_ROWS, RouteShape
from vime.errors import SampleError
from vime.utils.types import Sample

SHAPE = RouteShape(num_layers=3, top_k=2, num_experts=8)
NEEDS = EnqueueRequirements(routes=SHAPE, sc_top_k=2, top_p=True, max_tokens=20, vocab_size=50)
PROMPT, LENGTH = 3, 4


def good_routes(rows: int, shape: RouteShape = SHAPE) -> np.ndarray[Any, Any]:
    start = np.arange(rows * shape.num_layers).reshape(rows, shape.num_layers, 1)
    return ((start + np.arange(shape.top_k)) % shape.num_experts).astype(np.uint8)


def good(index: int = 5) -> Sample:
    """A sample that has everything, with a token in the middle that was not sampled."""
    log_half = math.log(0.5)
    return Sample(
        group_index=2,
        index=index,
        tokens=[1, 2, 3, 10, 11, 12, 13],
        response_length=LENGTH,
        loss_mask=[1, 1, 0, 1],
        rollout_log_probs=[log_half, log_half, 0.0, log_half],
        version_spans=[(0, 0, 2), (1, 3, 4)],
        rollout_topk_token_ids=np.tile(np.array([4, 9], np.int32), (LENGTH, 1)),
        rollout_topk_log_probs=np.tile(np.array([-0.5, -1.5], np.float32), (LENGTH, 1)),
        rollout_top_p_token_ids=np.array([10, 20, 11, 21, 13, 22], np.int32),
        rollout_top_p_token_offsets=np.array([0, 2, 4, 4, 6], np.int32),
        rollout_top_p_log_probs=np.full(6, log_half, np.float32),
        rollout_routed_experts=good_routes(PROMPT + LENGTH - 1),
        status=Sample.Status.COMPLETED,
    )


def changed(field: str, change: Callable[[Any], Any]) -> Sample:
    sample = good()
    setattr(sample, field, change(getattr(sample, field)))
    return sample


def put(position: Any, value: Any) -> Callable[[Any], Any]:
    def change(values: Any) -> Any:
        copied = list(values) if isinstance(values, list) else values.copy()
        copied[position] = value
        return copied

    return change


def refused(sample: Sample, needs: EnqueueRequirements = NEEDS) -> SampleError:
    """The refusal of this sample; the message names it."""
    with pytest.raises(SampleError) as caught:
        check_enqueue([sample], needs)
    assert caught.value.message.startswith(f"sample {sample.index} of group {sample.group_index}")
    return caught.value


def test_a_sample_that_has_all_the_objective_needs_passes() -> None:
    check_enqueue([good()], NEEDS)


def test_every_member_of_a_group_is_checked() -> None:
    with pytest.raises(SampleError, match="sample 6 of group 2"):
        check_enqueue([good(5), bad_member(6)], NEEDS)


def bad_member(index: int) -> Sample:
    sample = good(index)
    sample.rollout_log_probs = None
    return sample


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "log_prob_not_finite"),
        (math.inf, "log_prob_not_finite"),
        (-math.inf, "log_prob_not_finite"),
        (None, "log_prob_missing"),
        ("-0.5", "log_prob_no_number"),
        (0.25, "log_prob_above_zero"),
        (-1e300, "log_prob_not_finite"),
    ],
)
def test_a_log_probability_that_is_no_number_of_a_probability_is_refused(value: Any, reason: str) -> None:
    error = refused(changed("rollout_log_probs", put(1, value)))
    assert error.reason == reason
    assert "rollout_log_probs[1]" in error.message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_candidates_with_log_probabilities_that_are_not_finite_are_refused(value: float) -> None:
    assert refused(changed("rollout_topk_log_probs", put((1, 1), value))).reason == "sc_log_prob_not_finite"
    assert refused(changed("rollout_top_p_log_probs", put(3, value))).reason == "sc_log_prob_not_finite"


def test_a_log_probability_of_a_masked_token_is_checked_too() -> None:
    assert refused(changed("rollout_log_probs", put(2, math.nan))).reason == "log_prob_not_finite"


def test_a_sample_without_routes_is_refused_by_its_id_when_they_are_replayed() -> None:
    error = refused(changed("rollout_routed_experts", lambda _: None))
    assert error.reason == "routes_missing"
    assert error.message.startswith("sample 5 of group 2: there are no rollout_routed_experts")
    check_enqueue([changed("rollout_routed_experts", lambda _: None)], EnqueueRequirements())


def test_routes_of_three_parts_are_joined_in_order_and_cover_all_tokens_but_the_last() -> None:
    sample = Sample(group_index=0, index=0, tokens=[1, 2, 3], status=Sample.Status.COMPLETED)
    whole = good_routes(3 + 5 + 7 + 4 - 1)
    start = 0
    for count in (5, 7, 4):
        stop = len(sample.tokens) + count - 1
        sample.append_response_tokens(
            None,
            [7] * count,
            [-0.5] * count,
            meta_info={
                "weight_version": "1",
                "routed_experts": whole[start:stop],
                "routed_experts_prompt_start": start,
            },
        )
        start = stop
    assert np.array_equal(np.asarray(sample.rollout_routed_experts), whole)
    assert len(whole) == 3 + 15
    check_enqueue([sample], EnqueueRequirements(routes=SHAPE))


def test_routes_that_begin_behind_a_gap_are_refused_and_the_sample_stays_as_it_was() -> None:
    sample = good()
    before = sample.to_dict()
    late = {"weight_version": "1", "routed_experts": good_routes(1), "routed_experts_prompt_start": 7}
    with pytest.raises(SampleError, match="begin at row 7, but there are 6 rows before it") as caught:
        sample.append_response_tokens(None, [9, 9], [-0.5, -0.5], meta_info={**late, **candidates(2)})
    assert caught.value.reason == "routes_gap"
    assert sample.to_dict() == before


def candidates(count: int) -> dict[str, Any]:
    ids, offsets = np.arange(2 * count).reshape(count, 2), np.arange(0, 2 * count + 1, 2)
    return {
        "score_centering_topk": (ids, np.full((count, 2), -1.0)),
        "score_centering_top_p": (ids.reshape(-1), offsets, np.full(2 * count, math.log(0.5))),
    }


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        (lambda routes: routes[1:], "routes_rows", "routes have 5 rows, allowed: 6"),
        (lambda routes: [routes[:2], routes[3:]], "routes_rows", "routes have 5 rows, allowed: 6"),
        (lambda routes: np.concatenate([routes, routes[:1]]), "routes_rows", "routes have 7 rows"),
        (lambda routes: routes[:, :2], "routes_shape", "2 layers and 2 experts a token, allowed: 3 and 2"),
        (lambda routes: [routes[:2], routes[2:, :2]], "routes_shape", "chunk 1"),
        (lambda routes: routes.astype(np.float32), "routes_shape", "float32"),
        (put((2, 1, 0), 8), "routes_id_range", "run from 0 to 8, allowed: 0 to 7"),
        (lambda routes: put((2, 1, 0), -1)(routes.astype(np.int64)), "routes_id_range", "run from -1"),
        (put((2, 1), 5), "routes_repeated", "token 2 in layer 1 are [5, 5], allowed: 2 different experts"),
        (put((5, 2), 0), "routes_all_zero", "token 5 in layer 2 are [0, 0]"),
        (np.zeros_like, "routes_all_zero", "all routes are zero"),
    ],
)
def test_routes_that_are_not_what_a_router_chose_are_refused(
    change: Callable[[Any], Any], reason: str, words: str
) -> None:
    error = refused(changed("rollout_routed_experts", change))
    assert error.reason == reason
    assert words in error.message


def test_a_repeat_is_found_in_every_part_of_long_routes() -> None:
    shape = RouteShape(num_layers=2, top_k=3, num_experts=300)
    rows = CHUNK_ROWS // 2 + 10
    sample = good()
    sample.tokens = [1] * (rows + 1)
    routes = np.tile(np.array([255, 256, 257], np.uint16), (rows, 2, 1))
    sample.rollout_routed_experts = routes
    check_enqueue([sample], EnqueueRequirements(routes=shape))
    routes[rows - 1, 1, 2] = 255
    error = refused(sample, EnqueueRequirements(routes=shape))
    assert f"the routes of token {rows - 1} in layer 1 are [255, 256, 255]" in error.message


def test_experts_chosen_one_at_a_time_may_be_expert_zero_but_not_everywhere() -> None:
    shape = RouteShape(num_layers=3, top_k=1, num_experts=8)
    sample = changed("rollout_routed_experts", lambda routes: put((0, 0), 1)(np.zeros_like(routes[..., :1])))
    check_enqueue([sample], EnqueueRequirements(routes=shape))
    sample.rollout_routed_experts = np.zeros((6, 3, 1), np.uint8)
    assert refused(sample, EnqueueRequirements(routes=shape)).reason == "routes_all_zero"


@pytest.mark.parametrize(
    ("field", "change", "reason"),
    [
        ("status", lambda _: Sample.Status.ABORTED, "status"),
        ("response_length", lambda _: 0, "response_length"),
        ("response_length", lambda _: 7, "response_length"),
        ("tokens", lambda tokens: [0] * 14 + tokens, "token_budget"),
        ("tokens", put(0, 50), "token_id"),
        ("tokens", put(0, -1), "token_id"),
        ("tokens", put(0, None), "token_id"),
        ("loss_mask", lambda mask: mask[1:], "loss_mask_length"),
        ("loss_mask", put(0, 2), "loss_mask"),
        ("rollout_log_probs", lambda _: None, "log_probs_missing"),
        ("rollout_log_probs", lambda values: values[1:], "rollout_log_probs_length"),
        ("version_spans", lambda spans: spans[1:], "version_missing"),
        ("version_spans", lambda spans: [*spans, (1, 3, 4)], "version_spans"),
        ("version_spans", lambda spans: [*spans, (1, 4, 5)], "version_spans"),
        ("version_spans", lambda spans: spans[::-1], "version_spans"),
        ("version_spans", put(0, (-1, 0, 2)), "version_spans"),
        ("rollout_topk_token_ids", lambda _: None, "sc_missing"),
        ("rollout_topk_log_probs", lambda _: None, "sc_missing"),
        ("rollout_topk_token_ids", lambda ids: ids[1:], "sc_rows"),
        ("rollout_topk_log_probs", lambda values: values[:, :1], "sc_rows"),
        ("rollout_topk_token_ids", put((1, 0), 50), "sc_id_range"),
        ("rollout_topk_token_ids", put((1, 0), -1), "sc_id_range"),
        ("rollout_topk_token_ids", put((1, 0), 9), "sc_ids_repeated"),
        ("rollout_topk_log_probs", put((1, 0), 0.1), "sc_log_prob_above_zero"),
        ("rollout_topk_log_probs", put((1, 0), -1.6), "sc_not_sorted"),
        ("rollout_topk_log_probs", put((1, 0), -0.2), "sc_mass"),
        ("rollout_top_p_token_ids", lambda _: None, "top_p_missing"),
        ("rollout_top_p_token_offsets", lambda _: None, "top_p_missing"),
        ("rollout_top_p_token_offsets", lambda offsets: offsets[1:], "top_p_offsets"),
        ("rollout_top_p_token_offsets", put(0, 1), "top_p_offsets"),
        ("rollout_top_p_token_offsets", put(-1, 5), "top_p_offsets"),
        ("rollout_top_p_token_offsets", put(1, 5), "top_p_offsets"),
        ("rollout_top_p_log_probs", lambda values: values[1:], "top_p_offsets"),
        ("rollout_top_p_token_offsets", put(1, 0), "top_p_empty"),
        ("rollout_top_p_token_ids", put(1, 10), "sc_ids_repeated"),
        ("rollout_top_p_token_ids", put(1, 50), "sc_id_range"),
        ("rollout_top_p_log_probs", put(1, -3.0), "sc_mass"),
        ("rollout_top_p_token_ids", put(2, 23), "top_p_sampled_token"),
        ("rollout_log_probs", put(1, -0.7), "top_p_log_prob"),
    ],
)
def test_each_missing_or_broken_part_is_refused_for_its_own_reason(
    field: str, change: Callable[[Any], Any], reason: str
) -> None:
    assert refused(changed(field, change)).reason == reason


def test_a_sampled_token_that_top_p_had_excluded_is_refused_with_the_ids() -> None:
    error = refused(changed("rollout_top_p_token_ids", put(2, 23)))
    assert "response token 1 is 11, but top-p left [23, 21]" in error.message


@pytest.mark.parametrize("how", ["mask", "removed"])
def test_a_sample_that_is_not_trained_needs_neither_routes_nor_candidates(how: str) -> None:
    sample = Sample(
        group_index=0, index=0, tokens=[1, 2], response_length=1, status=Sample.Status.TRUNCATED, loss_mask=[0]
    )
    if how == "removed":
        sample.loss_mask, sample.remove_sample = None, True
    check_enqueue([sample], NEEDS)
    sample.rollout_routed_experts = good_routes(5)
    assert refused(sample).reason == "routes_rows"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (None, "teacher_log_probs_missing"),
        ([-0.5] * (LENGTH - 1), "teacher_log_probs_length"),
        ([-0.5, math.nan, -0.5, -0.5], "teacher_log_prob"),
        ([-0.5, -math.inf, -0.5, -0.5], "teacher_log_prob"),
        ([-0.5, 0.25, -0.5, -0.5], "teacher_log_prob"),
    ],
)
def test_distillation_needs_a_probability_of_each_token_under_the_teacher(values: Any, reason: str) -> None:
    needs = EnqueueRequirements(teacher=True)
    with pytest.raises(SampleError) as caught:
        check_enqueue([changed("teacher_log_probs", lambda _: values)], needs)
    assert caught.value.reason == reason
    check_enqueue([changed("teacher_log_probs", lambda _: [-0.5] * LENGTH)], needs)
    check_enqueue([changed("loss_mask", lambda _: [0] * LENGTH)], needs)


def test_supervised_fine_tuning_needs_no_log_probabilities_and_no_versions() -> None:
    sample = Sample(group_index=0, index=0, tokens=[1, 2], response_length=1, status=Sample.Status.COMPLETED)
    assert refused(sample, EnqueueRequirements()).reason == "log_probs_missing"
    check_enqueue([sample], EnqueueRequirements(sampled=False))


def test_numbers_are_checked_before_they_are_narrowed() -> None:
    """Two entries that float16 can't tell apart are in order; in the wrong order they are refused all the same."""
    close = np.array([-10.001, -10.002], np.float32)
    assert close.astype(np.float16)[0] == close.astype(np.float16)[1]
    sample = changed("rollout_topk_log_probs", put(1, close))
    check_enqueue([sample], NEEDS)
    encode_group([sample], sc_dtype="float16")
    assert refused(changed("rollout_topk_log_probs", put(1, close[::-1]))).reason == "sc_not_sorted"
