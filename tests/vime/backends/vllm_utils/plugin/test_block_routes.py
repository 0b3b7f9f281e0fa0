"""Captured routes stay complete through the prefix cache, preemption and chunks of a long prompt."""

from __future__ import annotations

import numpy as np
import pytest

from vime.backends.vllm_utils.plugin.block_routes import BlockRoutes

SIZE = 4
"""Tokens of a cache block."""


def rows(start: int, stop: int, version: int = 0) -> np.ndarray:
    """Routes [n, L = 2, K = 1] that tell token and version."""
    tokens = np.arange(start, stop, dtype=np.uint8)[:, None, None]
    return np.concatenate([tokens, np.full_like(tokens, version)], axis=1)


def never() -> list[int]:
    pytest.fail("blocks are asked for only when one is filled or was found in the cache")


def test_rows_of_prompt_and_response_come_out_once_and_in_order() -> None:
    routes = BlockRoutes(SIZE)
    routes.add("a", 0, rows(0, 3), never)
    first = routes.take("a", 0)
    routes.add("a", 3, rows(3, 4), lambda: [7])
    routes.add("a", 4, rows(4, 5), never)
    second = routes.take("a", 0)
    assert first is not None
    assert second is not None
    np.testing.assert_array_equal(np.concatenate([first, second]), rows(0, 5))
    assert routes.take("a", 0) is None


def test_rows_before_a_continuation_are_left_out() -> None:
    routes = BlockRoutes(SIZE)
    routes.add("a", 0, rows(0, 6), lambda: [1, 2])
    found = routes.take("a", 5)
    assert found is not None
    np.testing.assert_array_equal(found, rows(5, 6))


def test_a_prompt_found_in_the_cache_has_the_rows_of_the_request_that_filled_it() -> None:
    routes = BlockRoutes(SIZE)
    routes.add("a", 0, rows(0, 6), lambda: [1, 2])  # a long prompt in two chunks
    routes.add("a", 6, rows(6, 9), lambda: [1, 2, 3])
    routes.keep_only(set())
    routes.add("b", 8, rows(8, 10, version=1), lambda: [1, 2, 9])
    found = routes.take("b", 0)
    assert found is not None
    np.testing.assert_array_equal(found, np.concatenate([rows(0, 8), rows(8, 10, version=1)]))


def test_a_preempted_request_keeps_the_routes_under_which_its_tokens_were_first_used() -> None:
    routes = BlockRoutes(SIZE)
    routes.add("a", 0, rows(0, 6), lambda: [1, 2])
    routes.add("a", 0, rows(0, 7, version=1), lambda: [5, 6])  # computed again in other blocks, one token further
    found = routes.take("a", 0)
    assert found is not None
    np.testing.assert_array_equal(found, np.concatenate([rows(0, 6), rows(6, 7, version=1)]))


def test_blocks_that_a_preempted_request_fills_again_serve_the_next_one() -> None:
    routes = BlockRoutes(SIZE)
    routes.add("a", 0, rows(0, 6), lambda: [1, 2])
    routes.add("other", 0, rows(50, 54), lambda: [1])  # took the block over
    routes.add("a", 0, rows(0, 7), lambda: [5, 6])
    routes.add("b", 4, rows(4, 6), lambda: [5, 8])
    found = routes.take("b", 0)
    assert found is not None
    np.testing.assert_array_equal(found, rows(0, 6))


def test_requests_that_ended_are_forgotten() -> None:
    routes = BlockRoutes(SIZE)
    routes.add("a", 0, rows(0, 2), never)
    routes.keep_only({"b"})
    assert routes.take("a", 0) is None
