"""Every parallel layout trains like one rank: losses, gradients, updated weights, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]

KINDS = ("sequence_ratio", "top_k", "nucleus")
QUICK = ("zigzag", "contiguous")


def assert_like_one_rank(found: dict[str, float]) -> None:
    assert found["moved"] > 1e-2
    assert found["weights"] < 1e-5
    assert found["metrics"] < 3e-5
    assert found["log_probs"] < 1e-5


@pytest.fixture(scope="module")
def quick(run_world: Any) -> dict[str, Any]:
    return run_world(2, [*QUICK, "refused_layouts"], "layout_worker.py")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", QUICK)
def test_context_parallel_ranks_train_like_one(quick: dict[str, Any], layout: str, kind: str) -> None:
    assert_like_one_rank(quick[layout][kind])


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("layout", ["--cp-comm-type is a2a", "p2p, allgather"]),
        ("own_weighting", ["--custom-tis-function-path", "--context-parallel-size 2"]),
    ],
)
def test_refused_layouts_say_what_is_allowed(quick: dict[str, Any], name: str, parts: list[str]) -> None:
    said = quick["refused_layouts"][name]
    assert said.startswith("SettingsError")
    assert [part for part in parts if part not in said] == [], said
