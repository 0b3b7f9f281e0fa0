"""Every family of models computes what transformers computes, and its weights come back as they went in."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.tiny_families import FAMILIES
from vime.models.families import FAMILIES as SHAPES
from vime.models.weight_names import NAMES

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]


SPLITS = (
    "bias_tensor",
    "fused_tensor",
    "latent_tensor",
    "latent_pipeline",
    "latent_experts",
    "latent_zigzag",
    "latent_contiguous",
    "latent_recompute",
)


@pytest.fixture(scope="module")
def one_rank(run_world: Any) -> dict[str, Any]:
    return run_world(1, ["families"], "family_worker.py")["families"]


def test_every_type_has_a_shape_and_names_and_is_compared_here() -> None:
    assert {model_type for model_type, _ in FAMILIES.values()} == set(NAMES) == set(SHAPES)


@pytest.fixture(scope="module")
def two_ranks(run_world: Any) -> dict[str, Any]:
    return run_world(2, list(SPLITS), "family_worker.py", 500)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(one_rank: dict[str, Any], name: str) -> None:
    found = one_rank[name]
    assert found["spread"] > 0.1, "the model is too flat to tell errors"
    assert found["relative"] < 2e-5
    assert found["packed_to_alone"] < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_come_back_bit_equal(one_rank: dict[str, Any], name: str) -> None:
    assert one_rank[name]["bit_equal"]


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_a_family_trains_on_two_ranks_as_on_one(two_ranks: dict[str, Any], split: str) -> None:
    found = two_ranks[split]
    kept = [name for name, moved in found["moved"].items() if moved == 0.0]
    assert all(name.endswith("e_score_correction_bias") for name in kept), (
        "everything but the selection bias is trained"
    )
    assert found["weights"] < 1e-5
    assert found["metrics"] < 3e-5
