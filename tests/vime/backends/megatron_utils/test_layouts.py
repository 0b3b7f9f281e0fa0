"""Every parallel layout trains like one rank: losses, gradients, updated weights, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(1000)]

DENSE, EXPERTS = (
    ("sequence_ratio", "top_k", "nucleus", "own_functions"),
    ("sequence_ratio", "routes", "own_routes"),
)
ON_TWO_RANKS = {
    "contiguous": DENSE,
    "tensor": DENSE,
    "sequence": DENSE,
    "pipeline": DENSE,
    "virtual": DENSE,
    "distributed": DENSE,
    "experts": EXPERTS,
    "experts_tensor": EXPERTS,
    "experts_recompute": EXPERTS,
    "experts_zigzag": EXPERTS,
    "experts_pipeline": EXPERTS,
    "experts_pipeline_recompute": EXPERTS,
    "experts_virtual": EXPERTS,
    "experts_distributed": EXPERTS,
}
ON_FOUR_RANKS = {
    "zigzag_tensor": DENSE,
    "contiguous_sequence": DENSE,
    "zigzag_pipeline": DENSE,
    "contiguous_data": DENSE,
    "tensor_data_distributed": DENSE,
    "tensor_pipeline": DENSE,
    "tensor_virtual": DENSE,
    "experts_of_tensor_ranks": EXPERTS,
    "cut_experts": EXPERTS,
    "experts_zigzag_data": EXPERTS,
    "experts_pipeline_data": EXPERTS,
}
CHAINS = ("chain_plain", "chain_distributed", "chain_experts")


def cases(layouts: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(layout, kind) for layout, kinds in layouts.items() for kind in kinds]


def assert_like_one_rank(found: dict[str, float], kind: str) -> None:
    assert found["moved"] > 1e-2
    assert found["weights"] < 1e-5
    assert found["metrics"] < 1e-5
    assert found["log_probs"] < 1e-5
    assert found["tokens"] < 1e-5
    assert (found["replayed"] > 0) == (kind in ("routes", "own_routes"))


def assert_chain_is_unbroken(found: dict[str, Any]) -> None:
    assert found["moved"] > 1e-3
    assert min(found["norms"]) > 0.1, "the training must go on"
    assert max(found["metrics"]) < 3e-5
    assert found["weights"] < 1e-5


@pytest.fixture(scope="module")
def quick(run_world: Any) -> dict[str, Any]:
    scenarios = ["zigzag", "experts_contiguous", "replayed_routes", "other_expert_layout", "refused_layouts"]
    return run_world(2, scenarios, "layout_worker.py")


@pytest.fixture(scope="module")
def two_ranks(run_world: Any) -> dict[str, Any]:
    return run_world(2, [*ON_TWO_RANKS, *CHAINS], "layout_worker.py", 900)


@pytest.fixture(scope="module")
def four_ranks(run_world: Any) -> dict[str, Any]:
    return run_world(4, [*ON_FOUR_RANKS, "chain_expert_ranks"], "layout_worker.py", 900)


@pytest.mark.parametrize(("layout", "kind"), cases({"zigzag": DENSE, "experts_contiguous": EXPERTS}))
def test_context_parallel_ranks_train_like_one(quick: dict[str, Any], layout: str, kind: str) -> None:
    assert_like_one_rank(quick[layout][kind], kind)


def test_replayed_experts_decide_the_log_probabilities(quick: dict[str, Any]) -> None:
    found = quick["replayed_routes"]
    assert found["same"] < 1e-6, "the experts of the Hugging Face model are the router's own choice"
    assert found["other"] > 0.1
    assert found["ignored"] == 0.0


def test_the_trainers_own_experts_are_recorded_and_replayed_after_weights_have_changed(quick: dict[str, Any]) -> None:
    found = quick["replayed_routes"]
    assert found["recorded"], "the experts of the Hugging Face model are the router's own choice"
    assert found["fraction"] == 1.0
    assert found["recorded_later"] < 1e-6
    assert found["free_later"] > 1e-3


def test_the_pass_that_records_experts_calls_the_hook_of_log_probs_once(quick: dict[str, Any]) -> None:
    assert quick["replayed_routes"]["hooked"] == [""]


def test_a_trained_sample_without_routes_is_named(quick: dict[str, Any]) -> None:
    said = quick["replayed_routes"]["said"]
    assert said.startswith("TrainerError: samples 102 have no routes")


def test_a_checkpoint_of_spread_experts_is_refused_where_ranks_hold_all(quick: dict[str, Any]) -> None:
    said = quick["other_expert_layout"]["said"]
    assert said.startswith("RestoreError")
    assert "--expert-model-parallel-size 2, found: 1, allowed: 2 or more" in said


def test_an_unknown_way_to_cut_a_pack_is_refused(quick: dict[str, Any]) -> None:
    said = quick["refused_layouts"]["said"]
    assert said.startswith("SettingsError: --cp-comm-type is a2a, allowed: one of p2p, allgather.")


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kind"), cases(ON_TWO_RANKS))
def test_two_ranks_train_like_one(two_ranks: dict[str, Any], layout: str, kind: str) -> None:
    assert_like_one_rank(two_ranks[layout][kind], kind)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kind"), cases(ON_FOUR_RANKS))
def test_four_ranks_train_like_one(four_ranks: dict[str, Any], layout: str, kind: str) -> None:
    assert_like_one_rank(four_ranks[layout][kind], kind)


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS)
def test_a_checkpoint_of_each_layout_resumes_in_the_next(two_ranks: dict[str, Any], chain: str) -> None:
    assert_chain_is_unbroken(two_ranks[chain])


@pytest.mark.slow
def test_spread_experts_resume_in_other_products(four_ranks: dict[str, Any]) -> None:
    assert_chain_is_unbroken(four_ranks["chain_expert_ranks"])
